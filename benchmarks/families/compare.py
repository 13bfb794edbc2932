"""Comparison of two runs: outputs and buffers bit by bit, gradients bit by bit or within a tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Difference", "Run", "compare", "compare_tensors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Result of one forward (and backward) pass."""

    leaves: list[Any]
    """The output, flattened."""
    spec: Any
    """The output's structure."""
    gradients: dict[str, torch.Tensor | None]
    """By parameter; ``None`` without a gradient."""
    buffers: dict[str, torch.Tensor]
    """By name, after the run."""
    cpu_s: float = 0.0
    """CPU time of forward and, in train mode, backward."""


class Difference(Exception):
    """Two runs are not equal."""


def compare(what: str, plain: Run, run: Run, tolerance: float = 0.0) -> bool:
    """Raise ``Difference`` unless gradients are within ``tolerance`` and all else is equal.

    Return whether gradients are bit-identical.
    """
    if plain.spec != run.spec:
        raise Difference(f"{what}: the structure of the output differs")
    for index, (first, second) in enumerate(zip(plain.leaves, run.leaves, strict=True)):
        if isinstance(first, torch.Tensor):
            compare_tensors(what, {f"output {index}": first}, {f"output {index}": second})
        elif first is not second and first != second:
            raise Difference(f"{what}: output {index} is {second!r}, not {first!r}")
    compare_tensors(what, plain.buffers, run.buffers)
    missing = [name for name, value in plain.gradients.items() if (value is None) != (run.gradients[name] is None)]
    if missing:
        raise Difference(f"{what}: gradient of {missing[0]} is missing or extra ({len(missing)} in all)")
    first_gradients = {name: value for name, value in plain.gradients.items() if value is not None}
    second_gradients = {name: value for name, value in run.gradients.items() if value is not None}
    return compare_tensors(f"{what}: gradient", first_gradients, second_gradients, tolerance)


def compare_tensors(
    what: str, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], tolerance: float = 0.0
) -> bool:
    """Raise ``Difference`` unless the tensors are equal (NaN equals NaN) or within the tolerance.

    Errors are relative to the largest value among the tensors of the same module: a bias before a batch norm has a
    gradient of zero plus rounding noise, which differs every time.
    """
    if list(first) != list(second):
        raise Difference(f"{what}: the names differ")
    different = [name for name in first if not _equal(first[name], second[name])]
    modules = {name.rpartition(".")[0] for name in different}
    scales = dict.fromkeys(modules, 0.0)
    for name, value in first.items():
        module = name.rpartition(".")[0]
        if module in modules:
            scales[module] = max(scales[module], _largest(value))
    far = {name: _error(first[name], second[name], scales[name.rpartition(".")[0]]) for name in different}
    far = {name: error for name, error in far.items() if not error <= tolerance}
    if far:
        worst = max(far, key=far.__getitem__)
        raise Difference(f"{what}: {worst} is off by {far[worst]:.1e} ({len(far)} of {len(first)} tensors differ)")
    return not different


def _equal(first: torch.Tensor, second: Any) -> bool:
    if not isinstance(second, torch.Tensor) or first.shape != second.shape or first.dtype != second.dtype:
        return False
    if torch.equal(first, second):
        return True
    return bool(torch.equal(first.nan_to_num(), second.nan_to_num()) and torch.equal(first.isnan(), second.isnan()))


def _error(first: torch.Tensor, second: Any, scale: float) -> float:
    """Return the maximum difference, relative to the scale."""
    if not isinstance(second, torch.Tensor) or first.shape != second.shape or first.dtype != second.dtype:
        return float("inf")
    error = _largest(first.double() - second.double())
    return error / scale if scale else float("inf")


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0
