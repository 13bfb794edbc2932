"""Relations between a wrong tensor and the right one: a factor, a shift, a permutation of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from stagewright.verification.assembly import relative_error


def largest(value: torch.Tensor) -> float:
    """Return the largest finite magnitude."""
    return float(value.double().abs().nan_to_num(nan=0.0, posinf=0.0).max()) if value.numel() else 0.0


def is_close(value: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors agree relative to the largest value."""
    return relative_error(value, expected, largest(expected)) <= tolerance


def constant_factor(value: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float | None:
    """Return c if ``value = c · expected``."""
    if value.shape != expected.shape or not expected.is_floating_point():
        return None
    left, right = value.double().flatten(), expected.double().flatten()
    norm = float(right @ right)
    factor = float(left @ right) / norm if norm else math.nan
    if not math.isfinite(factor) or abs(factor) < 1e-12:
        return None
    return factor if is_close(left / factor, right, 2 * tolerance) else None


def find_shift(value: torch.Tensor, expected: torch.Tensor, tolerance: float, max_shift: int = 8) -> str | None:
    """Describe how a tensor is a shifted copy of another: along a dimension, or whole numbers plus a constant."""
    if value.shape != expected.shape or not value.numel():
        return None
    if not value.is_floating_point() and value.dtype != torch.bool:
        difference = torch.unique(value.long() - expected.long())
        if len(difference) == 1 and int(difference[0]):
            return f"all indices are shifted by {int(difference[0])}"
    for dim in range(1 if value.ndim > 1 else 0, value.ndim):
        size = value.shape[dim]
        for shift in range(1, min(max_shift + 1, size - 1)):
            for signed in (shift, -shift):
                start = max(signed, 0)
                kept = value.narrow(dim, start, size - shift)
                source = expected.narrow(dim, start - signed, size - shift)
                if _varies(source, dim) and _agree(kept, source, tolerance):
                    return f"it is the baseline's shifted by {signed} in dimension {dim}"
    return None


def _varies(value: torch.Tensor, dim: int) -> bool:
    """Whether a tensor changes along a dimension, so that a shift can be seen."""
    return value.shape[dim] > 1 and not torch.equal(
        value.narrow(dim, 1, value.shape[dim] - 1), value.narrow(dim, 0, value.shape[dim] - 1)
    )


def _agree(value: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return is_close(value, expected, tolerance) if value.is_floating_point() else torch.equal(value, expected)


def find_block_order(value: torch.Tensor, expected: torch.Tensor, tolerance: float, parts: int) -> str | None:
    """Describe how a tensor consists of the blocks of another in another order."""
    if value.shape != expected.shape or not value.is_floating_point():
        return None
    for dim in range(value.ndim):
        for count in sorted({parts, 2 * parts, 3 * parts, 4 * parts}):
            size = value.shape[dim]
            if count < 2 or size % count:
                continue
            blocks, wanted = value.chunk(count, dim), expected.chunk(count, dim)
            order = [next((i for i, want in enumerate(wanted) if is_close(b, want, tolerance)), None) for b in blocks]
            if (
                None not in order
                and sorted(o for o in order if o is not None) == list(range(count))
                and order != list(range(count))
            ):
                return f"dimension {dim} has the baseline's {count} blocks in the order {', '.join(map(str, order))}"
    return None


def fit_sum(values: Sequence[torch.Tensor], expected: torch.Tensor) -> tuple[list[float], float]:
    """Return factors of the least-squares fit ``expected ≈ Σ cᵢ · valuesᵢ``, and the relative error of the fit."""
    matrix = torch.stack([value.double().flatten() for value in values], dim=1)
    target = expected.double().flatten()
    # Normal equations: there are only as many unknowns as ranks.
    factors = torch.linalg.lstsq(matrix.T @ matrix, (matrix.T @ target).unsqueeze(1), driver="gelsd").solution.squeeze(
        1
    )
    return [float(factor) for factor in factors], relative_error(matrix @ factors, target, largest(target))
