"""All-to-all attention (Ulysses): each worker attends over the whole sequence, with a share of the heads.

[batch, heads, positions of this worker, …]  ─ all-to-all ─►  [batch, heads / n, whole sequence, …]
attention of these heads, by any kernel      ─ all-to-all ─►  [batch, heads, positions of this worker, …]
"""

from __future__ import annotations

from typing import Any

import torch

from stagewright.engine.context.axis import ContextAxis


def to_heads(value: torch.Tensor, axis: ContextAxis, length: int) -> torch.Tensor:
    """Return the whole sequence of this worker's heads."""
    return _ToHeads.apply(value, axis, length)  # type: ignore[no-any-return, no-untyped-call]


def to_positions(value: torch.Tensor, axis: ContextAxis) -> torch.Tensor:
    """Return all heads of this worker's positions."""
    return _ToPositions.apply(value, axis)  # type: ignore[no-any-return, no-untyped-call]


def _gather_sequence(value: torch.Tensor, axis: ContextAxis, length: int) -> torch.Tensor:
    samples, heads, _, size = value.shape
    shapes = [
        (samples, heads // axis.num_workers, axis.num_positions(length, worker), size)
        for worker in range(axis.num_workers)
    ]
    return axis.join(axis.all_to_all(value.chunk(axis.num_workers, 1), shapes), 2, length)


def _gather_heads(value: torch.Tensor, axis: ContextAxis) -> torch.Tensor:
    samples, heads, length, size = value.shape
    parts = [axis.part(value, 2, worker) for worker in range(axis.num_workers)]
    shape = (samples, heads, axis.num_positions(length), size)
    return torch.cat(axis.all_to_all(parts, [shape] * axis.num_workers), 1)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, axis: ContextAxis, length: int) -> torch.Tensor:
        ctx.axis = axis
        return _gather_sequence(value, axis, length)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gather_heads(gradient, ctx.axis), None, None


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, axis: ContextAxis) -> torch.Tensor:
        ctx.axis, ctx.length = axis, value.shape[2]
        return _gather_heads(value, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather_sequence(gradient, ctx.axis, ctx.length), None
