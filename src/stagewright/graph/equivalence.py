"""Compare a captured graph with its model: run both from the same state and seed, and compare results bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stagewright import structure
from stagewright.graph.preserve import preserved


def find_difference(
    model: nn.Module,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    with_gradients: bool = False,
) -> str | None:
    """Describe how results, buffers or gradients of ``run`` differ from the model's; ``None`` if all are equal.

    Also ``None`` where no comparison is possible: the model raises an error, or two runs of the model itself differ (it
    draws from its own random generator).
    """

    def outcome(function: Callable[..., Any]) -> dict[str, Any]:
        return _outcome(model, function, args, kwargs, with_gradients=with_gradients)

    try:
        expected = outcome(model)
    except Exception:
        return None
    try:
        actual = outcome(run)
    except Exception as error:
        return f"it raises {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    problem = _compare(expected, actual)
    if problem is not None and _compare(expected, outcome(model)) is not None:
        return None
    return problem


def mix_samples(arguments: tuple[tuple[Any, ...], dict[str, Any]], dim: int, leaves: Sequence[int]) -> Any:
    """Change the inputs' values within their range: roll the samples by one, and average floats with the original."""
    flat, spec = structure.flatten(arguments)
    for index in leaves:
        rolled = flat[index].roll(1, dim)
        flat[index] = (flat[index] + rolled) / 2 if flat[index].is_floating_point() else rolled
    return spec.unflatten(flat)


def is_repeatable(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether two runs in a row give the same results, although only buffers are restored in between."""
    results = []
    buffers = {name: value.detach().clone() for name, value in model.named_buffers()}
    with torch.inference_mode(False), preserved(model), torch.no_grad():
        for _ in range(2):
            torch.manual_seed(0)
            leaves = structure.leaves(_call_on_copies(model, args, kwargs))
            results.append({str(index): _copy(leaf) for index, leaf in enumerate(leaves)})
            for name, value in model.named_buffers():
                value.copy_(buffers[name])
    return _compare(*results) is None


def _outcome(
    model: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, with_gradients: bool
) -> dict[str, Any]:
    """Return results, buffers and gradients of one run; the model's state is preserved."""
    with torch.inference_mode(False), preserved(model), torch.enable_grad():
        torch.manual_seed(0)
        leaves = structure.leaves(_call_on_copies(run, args, kwargs))
        outcome = {f"result {index}": _copy(leaf) for index, leaf in enumerate(leaves)}
        outcome |= {f"buffer {name}": _copy(value) for name, value in model.named_buffers()}
        roots = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        if with_gradients and trained and roots:
            output_gradients = [
                torch.linspace(-1, 1, root.numel(), device=root.device).to(root.dtype).view(root.shape)
                for root in roots
            ]
            gradients = torch.autograd.grad(roots, list(trained.values()), output_gradients, allow_unused=True)
            for name, gradient in zip(trained, gradients, strict=True):
                sparse = gradient is not None and gradient.is_sparse
                outcome[f"gradient of {name}"] = gradient.to_dense() if sparse else gradient
        return outcome


def _call_on_copies(run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    copied_args, copied_kwargs = structure.map_tensors(_copy, (tuple(args), dict(kwargs)))
    return run(*copied_args, **copied_kwargs)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _compare(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> str | None:
    if expected.keys() != actual.keys():
        return f"it returns {len(actual)} values instead of {len(expected)}"
    for name, model_value in expected.items():
        value = actual[name]
        if not isinstance(model_value, torch.Tensor) or not isinstance(value, torch.Tensor):
            if type(model_value) is not type(value) or model_value != value:
                return f"{name} is {value!r} instead of {model_value!r}"
        elif model_value.shape != value.shape or model_value.dtype != value.dtype:
            return (
                f"{name} is {list(value.shape)} {value.dtype} instead of {list(model_value.shape)} {model_value.dtype}"
            )
        elif not torch.equal(torch.nan_to_num(model_value), torch.nan_to_num(value)):
            return f"{name} is off by {float((model_value.double() - value.double()).abs().max()):.2g}"
    return None
