"""Relative error of tensors. Pure.

relative error = max |value - expected| / max |expected|

For a gradient, max |expected| is taken over all parameters of its module: some gradients are zero up to rounding (the
bias of attention keys, biases before batch norm), and the relative error of noise is meaningless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

SMALLEST = 1e-8
"""Smallest scale: below it, the absolute error counts."""


def relative_error(value: torch.Tensor, expected: torch.Tensor, scale: float) -> float:
    """Return the largest error over the scale; infinite if shapes or dtypes differ or one value is NaN.

    Integers are counts and indices: any difference is at least 1.
    """
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return float("inf")
    if value.numel() == 0:
        return 0.0
    a, b = (to_float64(tensor.detach()).cpu() for tensor in (value, expected))
    errors = torch.where(equal_or_nan(a, b), 0.0, (a - b).abs())
    error = float(errors.nan_to_num(nan=float("inf")).max()) / max(scale, SMALLEST)
    return error if value.is_floating_point() or value.is_complex() or error == 0 else max(1.0, error)


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
    values = to_float64(tensor).abs()
    if tensor.is_floating_point() or tensor.is_complex():
        values = values[values < torch.finfo(tensor.dtype).max / 4]
    return float(values.max()) if values.numel() else 0.0
