"""Does a captured graph do what the model does? Run both from the same state and seed, and compare to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from stagewright.graph.preserve import preserved

__all__ = ["difference", "mixed", "steady"]


def difference(
    model: nn.Module,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    with_gradients: bool = False,
) -> str | None:
    """What differs between the model's results, buffers and gradients and those of ``run``; ``None`` if all is equal.

    A model that does not even agree with itself (it draws from a generator of its own) can't be compared: no
    difference is told. What the model itself raises is not told either: there is nothing to compare with.
    """

    def outcome(which: Callable[..., Any]) -> dict[str, Any]:
        return _outcome(model, which, args, kwargs, with_gradients=with_gradients)

    try:
        expected = outcome(model)
    except Exception:
        return None
    try:
        found = outcome(run)
    except Exception as error:
        return f"it raises {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    problem = _compare(expected, found)
    if problem is not None and _compare(expected, outcome(model)) is not None:
        return None
    return problem


def mixed(arguments: tuple[tuple[Any, ...], dict[str, Any]], dim: int, leaves: Sequence[int]) -> Any:
    """The same inputs with other values, in the same range: samples in another order, real ones averaged in pairs."""
    flat, spec = pytree.tree_flatten(arguments)
    for at in leaves:
        turned = flat[at].roll(1, dim)
        flat[at] = (flat[at] + turned) / 2 if flat[at].is_floating_point() else turned
    return pytree.tree_unflatten(flat, spec)


def steady(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the model gives the same results twice in a row, without being put back in between."""
    results = []
    buffers = {name: value.detach().clone() for name, value in model.named_buffers()}
    with torch.inference_mode(False), preserved(model), torch.no_grad():
        for _ in range(2):
            torch.manual_seed(0)
            copied = pytree.tree_map_only(torch.Tensor, lambda one: one.detach().clone(), (tuple(args), dict(kwargs)))
            results.append(
                {str(at): _kept(leaf) for at, leaf in enumerate(pytree.tree_leaves(model(*copied[0], **copied[1])))}
            )
            for name, value in model.named_buffers():
                value.copy_(buffers[name])
    return _compare(*results) is None


def _outcome(
    model: nn.Module,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    with_gradients: bool,
) -> dict[str, Any]:
    """Results, buffers and gradients of one run; the model is left as it was."""
    with torch.inference_mode(False), preserved(model), torch.enable_grad():
        torch.manual_seed(0)
        copied = pytree.tree_map_only(torch.Tensor, lambda one: one.detach().clone(), (tuple(args), dict(kwargs)))
        leaves = pytree.tree_leaves(run(*copied[0], **copied[1]))
        found = {f"result {at}": _kept(leaf) for at, leaf in enumerate(leaves)}
        found |= {f"buffer {name}": _kept(value) for name, value in model.named_buffers()}
        roots = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        if with_gradients and trained and roots:
            weights = [
                torch.linspace(-1, 1, one.numel(), device=one.device).to(one.dtype).view(one.shape) for one in roots
            ]
            gradients = torch.autograd.grad(roots, [one for _, one in trained], weights, allow_unused=True)
            whole = [one.to_dense() if one is not None and one.is_sparse else one for one in gradients]
            found |= {f"gradient of {name}": value for (name, _), value in zip(trained, whole, strict=True)}
        return found


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _compare(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    if expected.keys() != found.keys():
        return f"it gives {len(found)} values for the model's {len(expected)}"
    for name, one in expected.items():
        other = found[name]
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            if type(one) is not type(other) or one != other:
                return f"{name} is {other!r} where the model gives {one!r}"
        elif one.shape != other.shape or one.dtype != other.dtype:
            return f"{name} is {list(other.shape)} {other.dtype} where the model gives {list(one.shape)} {one.dtype}"
        elif not torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)):
            return f"{name} is off by {float((one.double() - other.double()).abs().max()):.2g}"
    return None
