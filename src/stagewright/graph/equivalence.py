"""Compare a captured graph with its model: run both from the same state and seed, and compare the results.

On one device with deterministic kernels they are equal bit by bit. Where two runs of the model itself differ (fused
attention on a GPU adds in no fixed order), the graph may differ by a multiple of that noise: at least by rounding, and
never by more than ``MAX_NOISE``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stagewright import structure
from stagewright.graph.preserve import preserved

MAX_NOISE = 0.1
"""Largest relative difference between two runs of a model that counts as noise, and between model and graph."""
NOISE_FACTOR = 4
"""Allowed difference over the measured one between runs of the model."""
_REPEATS = 2
_ROUNDINGS = 4  # units in the last place that are allowed where kernels are not deterministic


def find_difference(
    model: nn.Module,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    with_gradients: bool = False,
) -> str | None:
    """Describe how results, buffers or gradients of ``run`` differ from the model's; ``None`` if all are equal.

    Also ``None`` where no comparison is possible: the model raises an error, or two runs of the model itself differ by
    more than ``MAX_NOISE`` (it draws from its own random generator).
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
    if _compare(expected, actual) is None:
        return None
    noise = 0.0
    for _ in range(_REPEATS):
        repeated = outcome(model)
        if _compare(expected, repeated, MAX_NOISE) is not None:
            return None
        noise = max(noise, _largest_difference(expected, repeated))
    if not noise and not any(isinstance(value, torch.Tensor) and value.is_cuda for value in expected.values()):
        return _compare(expected, actual)
    tolerance = min(MAX_NOISE, NOISE_FACTOR * noise)
    problem = _compare(expected, actual, tolerance, rounding=True)
    # The kernels of the graph's own run may have been the ones that differ.
    return problem and _compare(expected, outcome(run), tolerance, rounding=True)


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
    return _compare(results[0], results[1]) is None


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


def _compare(
    expected: Mapping[str, Any], actual: Mapping[str, Any], tolerance: float = 0.0, *, rounding: bool = False
) -> str | None:
    """Describe the first difference above a relative tolerance; ``rounding``: allow some of the dtype's too."""
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
            is_float = value.is_floating_point()
            allowed = max(tolerance, _ROUNDINGS * torch.finfo(value.dtype).eps if rounding and is_float else 0.0)
            if not is_float or not _relative_difference(model_value, value) <= allowed:
                off_by = f"is off by {float((model_value.double() - value.double()).abs().max()):.2g}"
                return f"{name} {off_by}" + (
                    f", more than the allowed {allowed:.2g} of its largest value" if allowed else ""
                )
    return None


def _largest_difference(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> float:
    """Return the largest relative difference of any floating-point tensor."""
    pairs = [(value, actual[name]) for name, value in expected.items()]
    differences = [
        _relative_difference(first, second)
        for first, second in pairs
        if isinstance(first, torch.Tensor) and first.is_floating_point()
    ]
    return max(differences, default=0.0)


def _relative_difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the largest difference over the largest expected value; infinite if only one value is NaN."""
    if not expected.numel():
        return 0.0
    first, second = torch.nan_to_num(expected.double()), torch.nan_to_num(actual.double())
    if not torch.equal(expected.isnan(), actual.isnan()):
        return float("inf")
    return float((first - second).abs().max() / first.abs().max().clamp_min(1e-30))
