"""ZeRO-1 and ZeRO-2: replicas hold all parameters, but each steps a shard of them and holds its optimizer states only.

    zero = 1    full gradients, accumulated over the micro-batches ─► one reduce-scatter per step
    zero = 2    one reduce-scatter per micro-batch, added to the gradient of the shard; full gradients are freed
    both        optimizer step of the shard ─► all-gather of the parameters

    bucket      replica 0's shards of its parameters │ replica 1's │ …        each padded to the largest shard

A reduce-scatter and an all-gather move as many bytes as one all-reduce, so ZeRO-1 has the traffic of data parallelism.
Buckets are sent inside a backward pass as in ``gradient_allreduce``, in one order on all replicas. One is in flight at
a time, so that full gradients never exist twice. With one micro-batch, ZeRO-1 is ZeRO-2.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stagewright.engine.data.gradient_allreduce import all_reduce_tied
from stagewright.engine.data.parameter_shards import ParameterShards
from stagewright.engine.data.sharded_replica import all_gather
from stagewright.engine.tensor.axis import Axis, reduce_scatter
from stagewright.engine.worker.recorder import recorder
from stagewright.spec.zero import bucket_bytes


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements ``start`` to ``end`` of every replica's shard of a parameter."""

    parameter: nn.Parameter
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class _Bucket:
    """Gradients that are reduce-scattered together; one of a large parameter is divided into several buckets."""

    pieces: list[_Piece]
    num_pending: int = 0
    """Gradients that the running backward has not produced yet."""
    is_sent: bool = False

    def identities(self) -> Iterator[int]:
        """Yield the identity of each parameter."""
        return (id(piece.parameter) for piece in self.pieces)


@dataclass(slots=True)
class _InFlight:
    """A reduce-scatter that was started."""

    bucket: _Bucket
    sent: torch.Tensor
    received: torch.Tensor
    """The sum of this replica's shards; on a CPU the shards of all replicas, to be summed."""
    work: Any


class GradientReduceScatter:
    """Gradient reduce-scatters and parameter all-gathers of one worker."""

    def __init__(
        self,
        stages: Mapping[int, Sequence[nn.Parameter]],
        shards: ParameterShards,
        axis: Axis,
        *,
        every_microbatch: bool,
        tied: Sequence[tuple[nn.Parameter, Any]] = (),
        overlap: bool = False,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """``stages``: trainable parameters by stage; ``every_microbatch``: ZeRO-2; ``tied`` and ``overlap``: see
        ``GradientAllReduce``; ``on_change``: called when gradients were made or freed.
        """
        self._shards, self._axis, self._on_change = shards, axis, on_change
        self._every_microbatch, self._overlap = every_microbatch, overlap
        self._tied = [(shards.shard(parameter), group) for parameter, group in tied]
        self._stages = {stage: {id(parameter) for parameter in held} for stage, held in stages.items()}
        self._buckets: list[_Bucket] = []
        self._buckets_of: dict[int, list[_Bucket]] = {}
        self._used: set[int] = set()
        self._done: set[int] = set()
        self._is_expecting = False
        self._in_flight: _InFlight | None = None
        parameters = {id(value): value for held in stages.values() for value in held}.values()
        size = bucket_bytes(sum(parameter.nbytes for parameter in parameters))
        placed: set[int] = set()
        for stage in sorted(stages, reverse=True):  # backward reaches the last stage first
            unplaced = {id(value): value for value in reversed(stages[stage]) if id(value) not in placed}
            placed.update(unplaced)
            self._buckets += _fill_buckets(unplaced.values(), size, shards, axis.num_workers)
        for bucket in self._buckets:
            for piece in bucket.pieces:
                self._buckets_of.setdefault(id(piece.parameter), []).append(bucket)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for parameter in (parameters if overlap else ())
        ]

    def held_tensors(self) -> list[torch.Tensor]:
        """Return the gradients of the shards and the buffers in flight, to be counted as memory."""
        gradients = [shard.grad for _, shard in self._shards if shard.grad is not None]
        flying = self._in_flight
        return gradients if flying is None else [*gradients, flying.sent, flying.received]

    def last_backward(self, stage: int) -> None:
        """Announce the last backward of a stage: buckets may be sent inside it."""
        if self._overlap:
            self._expect_gradients()

    @contextlib.contextmanager
    def backward(self, stage: int) -> Iterator[None]:
        """Run the backward of a micro-batch inside; ZeRO-2 reduce-scatters its gradients, partly during it."""
        if self._every_microbatch and self._overlap:
            self._expect_gradients()
        yield
        if self._every_microbatch:
            for bucket in self._buckets:
                if not bucket.is_sent and not self._stages[stage].isdisjoint(bucket.identities()):
                    self._send(bucket)
                bucket.is_sent = False  # another stage may hold some of its parameters
            self._wait()

    def stage_done(self, stage: int) -> None:
        """Reduce-scatter all buckets whose parameters belong to finished stages only."""
        self._done.add(stage)
        if self._every_microbatch:
            return
        unfinished = set[int]().union(*(held for other, held in self._stages.items() if other not in self._done))
        for bucket in self._buckets:
            if not bucket.is_sent and unfinished.isdisjoint(bucket.identities()):
                self._send(bucket)

    @torch.no_grad()
    def finish(self) -> dict[str, int]:
        """Complete the gradients of the shards; return the payload bytes of ``tied`` weights."""
        for bucket in self._buckets if not self._every_microbatch else ():
            if not bucket.is_sent:
                self._send(bucket)
        self._wait()
        for bucket in self._buckets:
            bucket.is_sent = False
        self._is_expecting = False
        self._drop_unused()
        self._used.clear()
        self._done.clear()
        tied = all_reduce_tied(self._tied)
        self._on_change()
        return {"tied": tied}

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """All-gather the parameters after the optimizer step of the shards."""
        count = self._axis.num_workers
        for bucket in self._buckets:
            pieces = [piece for piece in bucket.pieces if piece.parameter.ndim]
            sizes = [piece.size for piece in pieces]
            if not sum(sizes):
                continue
            own = pieces[0].parameter.new_zeros(sum(sizes))
            for part, piece in zip(torch.split(own, sizes), pieces, strict=True):
                values = self._shards.shard(piece.parameter).reshape(-1)[piece.start : piece.end]
                part[: len(values)].copy_(values)
            gathered = own.new_empty(count * own.numel())
            start = recorder.now()
            all_gather(gathered, own, group=self._axis.group)
            recorder.add("collective", start, num_bytes=gathered.nbytes, note="data")
            self._axis.payload_bytes += gathered.nbytes
            for replica, row in enumerate(gathered.view(count, -1)):
                if replica == self._axis.index:
                    continue
                for part, piece in zip(torch.split(row, sizes), pieces, strict=True):
                    _write(self._shards.divide(piece.parameter.detach())[replica], piece.start, part)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _expect_gradients(self) -> None:
        self._is_expecting = True
        for bucket in self._buckets:
            bucket.num_pending, bucket.is_sent = len(bucket.pieces), False

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if not self._is_expecting:
            return
        own = self._buckets_of[id(parameter)]
        for bucket in own:
            bucket.num_pending -= 1
        if any(bucket.num_pending == 0 for bucket in own):
            for ready in itertools.takewhile(lambda bucket: bucket.num_pending == 0, self._buckets):
                if not ready.is_sent:
                    self._send(ready)

    @torch.no_grad()
    def _send(self, bucket: _Bucket) -> None:
        """Start the reduce-scatter of a bucket, with zeros for missing gradients, and free the full gradients."""
        self._wait()
        sizes = [piece.size for piece in bucket.pieces]
        flat = bucket.pieces[0].parameter.new_zeros((self._axis.num_workers, sum(sizes)))
        for piece, columns in zip(bucket.pieces, torch.split(flat, sizes, dim=1), strict=True):
            parameter = piece.parameter
            if parameter.grad is None:
                continue
            self._used.add(id(parameter))
            for row, part in zip(columns, self._shards.divide(parameter.grad), strict=True):
                values = part.reshape(-1)[piece.start : piece.end]
                row[: len(values)].copy_(values)
            if piece.end == self._shards.size(parameter):
                parameter.grad = None
        done = recorder.begin_overlapped(flat.nbytes, "data")
        self._axis.payload_bytes += flat.nbytes
        if flat.is_cuda:
            received = flat.new_empty(sum(sizes))
            work = reduce_scatter(received, flat.view(-1), group=self._axis.group, async_op=True)
        else:  # Gloo's reduce-scatter is an all-reduce that discards the rest: twice the bytes
            received = torch.empty_like(flat)
            work = dist.all_to_all_single(received, flat, group=self._axis.group, async_op=True)
        if recorder.is_recording:
            work.get_future().add_done_callback(lambda _: done())
        bucket.is_sent = True
        self._in_flight = _InFlight(bucket, flat, received, work)
        self._on_change()

    @torch.no_grad()
    def _wait(self) -> None:
        """Wait for the reduce-scatter in flight and add its result to the gradients of the shards."""
        flying = self._in_flight
        if flying is None:
            return
        start = recorder.now()
        flying.work.wait()
        recorder.add("collective", start, note="data")
        summed = flying.received if flying.received.ndim == 1 else flying.received.sum(dim=0)
        self._in_flight = None
        pieces = flying.bucket.pieces
        for piece, part in zip(pieces, torch.split(summed, [piece.size for piece in pieces]), strict=True):
            shard = self._shards.shard(piece.parameter)
            if shard.grad is None:
                shard.grad = torch.zeros_like(shard, memory_format=torch.contiguous_format)
            own = shard.grad.view(-1)[piece.start : piece.end]
            own += part[: len(own)]

    def _drop_unused(self) -> None:
        """Drop the zero gradients of parameters that no replica used, as in the baseline."""
        parameters = [parameter for parameter, _ in self._shards]
        used_here = [id(parameter) in self._used for parameter in parameters]
        if not used_here:
            return
        flags = self._axis.all_reduce(torch.tensor(used_here, dtype=torch.int64).to(parameters[0].device))
        if all(used_here):
            return  # without reading the flags, which would synchronize with the GPU
        for parameter, num_used in zip(parameters, flags.tolist(), strict=True):
            if not num_used:
                self._shards.shard(parameter).grad = None


def _fill_buckets(
    parameters: Iterable[nn.Parameter], bucket_size: int, shards: ParameterShards, num_replicas: int
) -> Iterator[_Bucket]:
    """Yield buckets of at most ``bucket_size`` bytes and one dtype and device, in the order of the parameters."""
    partial: dict[tuple[torch.dtype, torch.device], list[_Piece]] = {}
    for parameter in parameters:
        kind, start, size = (parameter.dtype, parameter.device), 0, shards.size(parameter)
        most = max(1, bucket_size // (num_replicas * parameter.element_size()))
        while start < size:
            pieces = partial.setdefault(kind, [])
            room = most - sum(piece.size for piece in pieces)
            end = min(size, start + room)
            pieces.append(_Piece(parameter, start, end))
            start = end
            if end - pieces[-1].start == room:
                yield _Bucket(partial.pop(kind))
    for pieces in partial.values():
        yield _Bucket(pieces)


def _write(shard: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Write values into a shard, a view of a parameter, from its element ``start`` on."""
    count = min(len(values), shard.numel() - start)
    if count <= 0:
        return
    if shard.is_contiguous():
        shard.view(-1)[start : start + count].copy_(values[:count])
    else:  # such as channels-last convolutions
        flat = shard.reshape(-1)
        flat[start : start + count] = values[:count]
        shard.copy_(flat.view(shard.shape))
