"""Relative error of tensors, computed on a GPU where one of them is there. Pure.

relative error = max |value - expected| / max |expected|

For a gradient, max |expected| is taken over all parameters of its module: some gradients are zero up to rounding (the
bias of attention keys, biases before batch norm), and the relative error of noise is meaningless.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

SMALLEST = 1e-8
"""Smallest scale: below it, the absolute error counts."""
CHUNK = 1 << 22  # elements compared at once, because float64 takes up to eight times the memory


def relative_error(value: torch.Tensor, expected: torch.Tensor, scale: float) -> float:
    """Return the largest error over the scale; infinite if shapes or dtypes differ or one value is NaN.

    Integers are counts and indices: any difference is at least 1.
    """
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return float("inf")
    if value.numel() == 0:
        return 0.0
    device = value.device if value.is_cuda else expected.device
    parts = [torch.split(tensor.detach().reshape(-1), CHUNK) for tensor in (value, expected)]
    largest = max(_largest_or_infinite(*(part.to(device) for part in pair)) for pair in zip(*parts, strict=True))
    error = largest / max(scale, SMALLEST)
    return error if value.is_floating_point() or value.is_complex() or error == 0 else max(1.0, error)


def _largest_or_infinite(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference; infinite if only one value is NaN."""
    largest = largest_difference(value, expected)
    if math.isfinite(largest):
        return largest
    a, b = to_float64(value), to_float64(expected)
    differences = torch.where(equal_or_nan(a, b), 0.0, (a - b).abs())
    return float(differences.nan_to_num(nan=float("inf")).max())


def largest_difference(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference; NaN if a value is NaN, or infinite in both.

    Differences of two float32 values are rounded to float32, which changes them by less than 1e-7 of themselves and is
    twenty times as fast as float64. Those too large for float32 are computed in float64.
    """
    if value.dtype == expected.dtype == torch.float32:
        largest = float((value - expected).abs_().max())
        if math.isfinite(largest):
            return largest
    return float((to_float64(value) - to_float64(expected)).abs().max())


def to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to float64; complex values to real and imaginary parts."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def equal_or_nan(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compare element by element; NaN equals NaN."""
    return (a == b) | (a.isnan() & b.isnan())


def scales(tensors: Mapping[str, torch.Tensor], *, by_module: bool) -> dict[str, float]:
    """Return the largest absolute value of each tensor, or of all parameters of its module."""
    largest = {name: _largest(tensor.detach()) for name, tensor in tensors.items()}
    if not by_module:
        return largest
    modules: dict[str, float] = {}
    for name, value in largest.items():
        module = name.rpartition(".")[0]
        modules[module] = max(modules.get(module, 0.0), value)
    return {name: modules[name.rpartition(".")[0]] for name in largest}


def name_outputs(outputs: Mapping[int, Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Name each output tensor ``MICROBATCH.INDEX``."""
    return {f"{microbatch}.{index}": tensor for microbatch, row in outputs.items() for index, tensor in enumerate(row)}


def label(kind: str, name: str) -> str:
    """Return the name of a compared tensor in reports; ``kind`` is gradients, buffers or outputs."""
    microbatch, _, index = name.partition(".")
    return f"output {index} of micro-batch {microbatch}" if kind == "outputs" else f"{kind[:-1]} of {name}"


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value, without infinite or nearly infinite ones (masks), which would hide errors."""
    if not tensor.numel():
        return 0.0
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return float(to_float64(tensor).abs().max())
    values = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).abs()
    if (largest := float(values.max())) < torch.finfo(tensor.dtype).max / 4:
        return largest
    return float(torch.where(values < torch.finfo(tensor.dtype).max / 4, values, 0).max())
