"""All-to-all attention (Ulysses): each worker attends over the whole sequence, with a share of the heads.

[batch, heads, positions of this worker, …]  ─ all-to-all ─►  [batch, heads / n, whole sequence, …]
attention of these heads, by any kernel      ─ all-to-all ─►  [batch, heads, positions of this worker, …]
"""

from __future__ import annotations

from typing import Any

import torch

from stagewright.engine.context.axis import ContextAxis


def to_heads(value: torch.Tensor, axis: ContextAxis) -> torch.Tensor:
    """Return the whole sequence of this worker's heads."""
    return _ToHeads.apply(value, axis)  # type: ignore[no-any-return, no-untyped-call]


def to_positions(value: torch.Tensor, axis: ContextAxis) -> torch.Tensor:
    """Return all heads of this worker's positions."""
    return _ToPositions.apply(value, axis)  # type: ignore[no-any-return, no-untyped-call]


def _gather_sequence(value: torch.Tensor, axis: ContextAxis) -> torch.Tensor:
    received = axis.all_to_all(torch.stack(value.chunk(axis.num_workers, 1)))
    joined = torch.cat(received.unbind(), 2)
    return joined.index_select(2, axis.order(joined.shape[2], value.device))


def _gather_heads(value: torch.Tensor, axis: ContextAxis) -> torch.Tensor:
    length = value.shape[2]
    parts = [value.index_select(2, axis.positions(length, worker, value.device)) for worker in range(axis.num_workers)]
    return torch.cat(axis.all_to_all(torch.stack(parts)).unbind(), 1)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, axis: ContextAxis) -> torch.Tensor:
        ctx.axis = axis
        return _gather_sequence(value, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather_heads(gradient, ctx.axis), None


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, axis: ContextAxis) -> torch.Tensor:
        ctx.axis = axis
        return _gather_heads(value, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather_sequence(gradient, ctx.axis), None
