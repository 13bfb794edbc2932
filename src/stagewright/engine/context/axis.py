"""The context axis of one worker: which positions of a sequence it has, and the exchange of activations.

    positions of 16 tokens on 4 workers     worker 0: chunks 0 and 7     under a causal mask, every worker attends to
    (zigzag: 8 chunks of 2)                 worker 1: chunks 1 and 6     equally many keys
                                            worker 2: chunks 2 and 5
                                            worker 3: chunks 3 and 4

                     forward                        backward
    scatter          this worker's positions        all-gather of the gradients
    gather           all-gather of all positions    this worker's positions of the gradient
    copy_to_region   identity                       all-reduce of the gradients
    leave            identity                       the gradient on the first worker, 0 on others

Outside of blocks activations are replicated, so every worker has the same full gradient there. The last two are for
what is whole inside of a block too, such as a bias: there, gradients are partial sums.

Chunks of a length that is no multiple of twice the workers differ by one token. All-gathers pad them to the longest;
rings and all-to-alls send them as they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from stagewright.engine.tensor.axis import Axis, pad_shard
from stagewright.engine.worker.recorder import recorder
from stagewright.errors import UsageError

_MOST_LENGTHS = 64  # lengths of sequences whose positions are kept
_CPU = torch.device("cpu")


class Shift:
    """Tensors that travel to the next worker of a ring while this one computes."""

    def __init__(self, works: Sequence[Any], sent: list[torch.Tensor], received: list[torch.Tensor], name: str) -> None:
        self._works, self._sent, self._received, self._name = works, sent, received, name

    def wait(self) -> list[torch.Tensor]:
        """Wait until everything is sent, and return what was received; the wait is recorded."""
        start = recorder.now()
        for work in self._works:
            work.wait()
        recorder.add("collective", start, num_bytes=sum(value.nbytes for value in self._sent), note=self._name)
        return self._received


class ContextAxis(Axis):
    """This worker's membership in the context axis."""

    def __init__(self, group: Any) -> None:
        super().__init__(group, "context")
        self._positions: dict[tuple[int, int, torch.device], torch.Tensor] = {}

    def positions(self, length: int, worker: int | None = None, device: torch.device = _CPU) -> torch.Tensor:
        """Return the positions of a sequence that a worker has, by default this one.

        They are kept on the device: a host that copies them there waits for everything that the GPU has to do.
        """
        worker = self.index if worker is None else worker
        known = self._positions.get((length, worker, device))
        if known is not None:
            return known
        with torch.inference_mode(False):
            chosen = torch.tensor(zigzag(length, self.num_workers)[worker], device=device)
        if type(chosen) is torch.Tensor:  # not one without values
            if len(self._positions) >= _MOST_LENGTHS:
                self._positions.clear()
            self._positions[length, worker, device] = chosen
        return chosen

    def part(self, value: torch.Tensor, dim: int, worker: int | None = None) -> torch.Tensor:
        """Copy a worker's positions of a whole sequence, by default this one's."""
        worker = self.index if worker is None else worker
        zigzag(value.shape[dim], self.num_workers)  # refuses sequences that are too short
        chunks = torch.split(value, chunk_sizes(value.shape[dim], self.num_workers), dim)
        return torch.cat([chunks[worker], chunks[2 * self.num_workers - 1 - worker]], dim)

    def join(self, parts: Sequence[torch.Tensor], dim: int, length: int) -> torch.Tensor:
        """Return the whole sequence of all workers' positions."""
        fronts, backs = [], []
        for worker, part in enumerate(parts):
            front = self.num_front(length, worker)
            fronts.append(part.narrow(dim, 0, front))
            backs.append(part.narrow(dim, front, part.shape[dim] - front))
        return torch.cat([*fronts, *reversed(backs)], dim)

    def scatter(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this worker's positions of a replicated activation."""
        return _Scatter.apply(value, self, dim)  # type: ignore[no-any-return, no-untyped-call]

    def gather(self, value: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """Return all positions of a divided activation, on every worker."""
        return _Gather.apply(value, self, dim, length)  # type: ignore[no-any-return, no-untyped-call]

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        """Pass what is whole out of a block."""
        return _Leave.apply(value, self)  # type: ignore[no-any-return, no-untyped-call]

    def num_positions(self, length: int, worker: int | None = None) -> int:
        """Return how many positions of a sequence a worker has, by default this one."""
        return len(zigzag(length, self.num_workers)[self.index if worker is None else worker])

    def gather_positions(self, value: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """All-gather positions, without autograd."""
        sizes = [self.num_positions(length, worker) for worker in range(self.num_workers)]
        value = pad_shard(value, max(sizes), dim)
        self.payload_bytes += value.nbytes * self.num_workers
        start = recorder.now()
        parts = self.all_gather(value)
        recorder.add("collective", start, num_bytes=value.nbytes * self.num_workers, note=self.name)
        return self.join([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim, length)

    def num_front(self, length: int, worker: int | None = None) -> int:
        """Return how many of a worker's positions, by default this one's, are of its chunk from the front."""
        return chunk_sizes(length, self.num_workers)[self.index if worker is None else worker]

    def shift(self, values: Sequence[torch.Tensor], size: int) -> Shift:
        """Begin to send tensors to the next worker of the ring, and to receive those of the one before.

        The received ones have ``size`` positions.
        """
        sent = [value.contiguous() for value in values]
        received = [value.new_empty((*value.shape[:-2], size, value.shape[-1])) for value in sent]
        ahead = dist.get_global_rank(self.group, (self.index + 1) % self.num_workers)
        behind = dist.get_global_rank(self.group, (self.index - 1) % self.num_workers)
        operations = [dist.P2POp(dist.isend, value, ahead, self.group) for value in sent]
        operations += [dist.P2POp(dist.irecv, value, behind, self.group) for value in received]
        self.payload_bytes += sum(value.nbytes for value in sent)
        return Shift(dist.batch_isend_irecv(operations), sent, received, self.name)

    def all_to_all(self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Send each worker its part and return theirs, of these shapes."""
        sent = torch.cat([part.reshape(-1) for part in parts])
        sizes = [math.prod(shape) for shape in shapes]
        received = sent.new_empty(sum(sizes))
        self.payload_bytes += sent.nbytes
        start = recorder.now()
        dist.all_to_all_single(received, sent, sizes, [part.numel() for part in parts], group=self.group)
        recorder.add("collective", start, num_bytes=sent.nbytes, note=self.name)
        return [part.view(*shape) for part, shape in zip(torch.split(received, sizes), shapes, strict=True)]


@lru_cache(maxsize=64)
def zigzag(length: int, num_workers: int) -> tuple[tuple[int, ...], ...]:
    """Return the positions of each worker: one chunk from the front and its mirror image from the back.

    >>> zigzag(8, 2)
    ((0, 1, 6, 7), (2, 3, 4, 5))
    >>> zigzag(9, 2)
    ((0, 1, 2, 7, 8), (3, 4, 5, 6))
    """
    if length < 2 * num_workers:  # models take a single token for a step of generation, which needs no causal mask
        way_out = f", or context={length // 2} or less" if length >= 4 else ""
        raise UsageError(
            f"context={num_workers} can't divide a sequence of {length} tokens, fewer than two for each worker: use "
            f"longer sequences{way_out}"
        )
    positions = iter(range(length))
    chunks = [tuple(itertools.islice(positions, size)) for size in chunk_sizes(length, num_workers)]
    return tuple(chunks[worker] + chunks[2 * num_workers - 1 - worker] for worker in range(num_workers))


def chunk_sizes(length: int, num_workers: int) -> list[int]:
    """Return the lengths of the chunks of a sequence, two for each worker.

    >>> chunk_sizes(9, 2)
    [3, 2, 2, 2]
    """
    size, rest = divmod(length, 2 * num_workers)
    # The first chunks get what is left over, then the last: no worker attends to a whole sequence more than another.
    longer = [*range(num_workers), *range(2 * num_workers - 1, num_workers - 1, -1)][:rest]
    return [size + (index in longer) for index in range(2 * num_workers)]


def laid_out_like(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a contiguous value with its dimensions in another's order of memory, in which dropout draws its masks."""
    if like.is_contiguous():
        return value
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda dim: -strides[dim])
    return value.permute(order).contiguous().permute([order.index(dim) for dim in range(like.dim())])


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, axis: ContextAxis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.length = axis, dim, value.shape[dim]
        return laid_out_like(value, axis.part(value, dim))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.axis.gather_positions(gradient, ctx.dim, ctx.length), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, axis: ContextAxis, dim: int, length: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return laid_out_like(value, axis.gather_positions(value, dim, length))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.axis.part(gradient, ctx.dim), None, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, axis: ContextAxis) -> torch.Tensor:
        ctx.axis = axis
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient if ctx.axis.index == 0 else torch.zeros_like(gradient), None
