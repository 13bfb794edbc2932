"""How far two tensors are apart, relative to what they are made of. Pure.

relative difference = largest |found - expected| / largest |expected|
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["SMALLEST", "numbers", "relative", "same", "scales"]

SMALLEST = 1e-8
"""Of a tensor whose largest value is below this, the absolute difference counts."""


def relative(found: torch.Tensor, expected: torch.Tensor, scale: float) -> float:
    """Largest difference over the scale; infinite where shapes or types differ or a value is not a number.

    Whole numbers are counts and places: another one is another, however near.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if found.numel() == 0:
        return 0.0
    a, b = (numbers(one.detach()).cpu() for one in (found, expected))
    apart = torch.where(same(a, b), 0.0, (a - b).abs())
    part = float(apart.nan_to_num(nan=float("inf")).max()) / max(scale, SMALLEST)
    return part if found.is_floating_point() or found.is_complex() or part == 0 else max(1.0, part)


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """What it is made of, in float64: of complex values both parts."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where both are one number, or both none."""
    return (a == b) | (a.isnan() & b.isnan())


def scales(tensors: Mapping[str, torch.Tensor], *, by_module: bool) -> dict[str, float]:
    """The largest value of each tensor, or of all parameters of its module."""
    largest = {name: _largest(one.detach()) for name, one in tensors.items()}
    if not by_module:
        return largest
    modules: dict[str, float] = {}
    for name, value in largest.items():
        home = name.rpartition(".")[0]
        modules[home] = max(modules.get(home, 0.0), value)
    return {name: modules[name.rpartition(".")[0]] for name in largest}


def _largest(tensor: torch.Tensor) -> float:
    """Of its numbers; those that stand for nothing (infinite, or nearly: masks) would hide all others."""
    values = numbers(tensor).abs()
    if tensor.is_floating_point() or tensor.is_complex():
        values = values[values < torch.finfo(tensor.dtype).max / 4]
    return float(values.max()) if values.numel() else 0.0
