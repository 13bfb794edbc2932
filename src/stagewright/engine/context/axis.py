"""The context axis of one worker: which positions of a sequence it has, and the exchange of activations.

    positions of 16 tokens on 4 workers     worker 0: chunks 0 and 7     under a causal mask, every worker attends to
    (zigzag: 8 chunks of 2)                 worker 1: chunks 1 and 6     equally many keys
                                            worker 2: chunks 2 and 5
                                            worker 3: chunks 3 and 4

              forward                            backward
    scatter   this worker's positions            all-gather of the gradients
    gather    all-gather of all positions        this worker's positions of the gradient

Outside of blocks activations are replicated, so every worker has the same full gradient there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from stagewright.engine.tensor.axis import Axis
from stagewright.engine.worker.recorder import recorder
from stagewright.errors import UsageError


class ContextAxis(Axis):
    """This worker's membership in the context axis."""

    def __init__(self, group: Any) -> None:
        super().__init__(group, "context")

    def positions(self, length: int, worker: int | None = None, device: torch.device | None = None) -> torch.Tensor:
        """Return the positions of a sequence that a worker has, by default this one."""
        chosen = zigzag(length, self.num_workers)[self.index if worker is None else worker]
        return torch.tensor(chosen, device=device)

    def order(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """Return where each position of a sequence is in the workers' positions one after another."""
        return torch.tensor(sum(zigzag(length, self.num_workers), ()), device=device).argsort()

    def scatter(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this worker's positions of a replicated activation."""
        return _Scatter.apply(value, self, dim)  # type: ignore[no-any-return, no-untyped-call]

    def gather(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """Return all positions of a divided activation, on every worker."""
        return _Gather.apply(value, self, dim)  # type: ignore[no-any-return, no-untyped-call]

    def gather_positions(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """All-gather positions, without autograd."""
        self.payload_bytes += value.nbytes * self.num_workers
        start = recorder.now()
        parts = self.all_gather(value)
        recorder.add("collective", start, num_bytes=value.nbytes * self.num_workers, note=self.name)
        return torch.cat(parts, dim).index_select(dim, self.order(value.shape[dim] * self.num_workers, value.device))

    def shift(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send values to the next worker of the ring and return those of the one before."""
        sent = [value.contiguous() for value in values]
        received = [torch.empty_like(value) for value in sent]
        ahead = dist.get_global_rank(self.group, (self.index + 1) % self.num_workers)
        behind = dist.get_global_rank(self.group, (self.index - 1) % self.num_workers)
        operations = [dist.P2POp(dist.isend, value, ahead, self.group) for value in sent]
        operations += [dist.P2POp(dist.irecv, value, behind, self.group) for value in received]
        num_bytes = sum(value.nbytes for value in sent)
        self.payload_bytes += num_bytes
        start = recorder.now()
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        recorder.add("collective", start, num_bytes=num_bytes, note=self.name)
        return received

    def all_to_all(self, value: torch.Tensor) -> torch.Tensor:
        """Exchange the parts of a tensor, stacked along dimension 0 by worker."""
        value = value.contiguous()
        output = torch.empty_like(value)
        self.payload_bytes += value.nbytes
        start = recorder.now()
        dist.all_to_all_single(output, value, group=self.group)
        recorder.add("collective", start, num_bytes=value.nbytes, note=self.name)
        return output


@lru_cache(maxsize=64)
def zigzag(length: int, num_workers: int) -> tuple[tuple[int, ...], ...]:
    """Return the positions of each worker: one chunk from the front and its mirror image from the back.

    >>> zigzag(8, 2)
    ((0, 1, 6, 7), (2, 3, 4, 5))
    """
    size, rest = divmod(length, 2 * num_workers)
    if rest or not size:
        raise UsageError(
            f"context={num_workers} divides sequences into {2 * num_workers} equal chunks, not {length} tokens: "
            f"use a sequence length that is a multiple of {2 * num_workers}"
        )
    last = 2 * num_workers - 1
    chunks = [tuple(range(index * size, (index + 1) * size)) for index in range(2 * num_workers)]
    return tuple(chunks[worker] + chunks[last - worker] for worker in range(num_workers))


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, axis: ContextAxis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return value.index_select(dim, axis.positions(value.shape[dim], device=value.device))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.axis.gather_positions(gradient, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, axis: ContextAxis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.gather_positions(value, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        positions = ctx.axis.positions(gradient.shape[ctx.dim], device=gradient.device)
        return gradient.index_select(ctx.dim, positions), None, None
