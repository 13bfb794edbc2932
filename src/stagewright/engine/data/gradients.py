"""Sum gradients over the workers that hold the same parameter: replicas (the data axis) and stages with tied weights.

    a stage's last backward ──► buckets of its gradients, all-reduced while others still work ──► there at the end
    tied weights (an embedding and its head on two workers) ──► summed once over their holders, after that

Losses are weighted by samples over the whole batch, so gradients are *summed*, not averaged: a replica with fewer
samples counts for less by itself. Where a worker has one stage and backward is not split, a bucket leaves inside the
last backward pass, as soon as its last gradient is there and the bucket before it has left (collectives must be in one
order on all replicas); otherwise when its stage is done. From then on gradients are views of their bucket: nothing is
copied back, and memory holds one bucket more than the gradients, not all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stagewright.engine.worker.recorder import recorder

__all__ = ["BUCKET_BYTES", "GradientSum", "holders_of_tied", "in_buckets"]

BUCKET_BYTES = 8 << 20  # large enough to use a link fully, small enough to leave early


def holders_of_tied(
    parameters_of_stages: Sequence[Iterable[nn.Parameter]], stage_workers: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """For each parameter (by identity) that several workers of a pipeline hold, those workers."""
    holders: dict[int, set[int]] = {}
    for worker, parameters in zip(stage_workers, parameters_of_stages, strict=True):
        for parameter in parameters:
            holders.setdefault(id(parameter), set()).add(worker)
    return {identity: tuple(sorted(workers)) for identity, workers in holders.items() if len(workers) > 1}


def in_buckets(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Parameters of one type and device each, up to a size, in the order in which they are complete."""
    open_ones: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kind = parameter.dtype, parameter.device
        bucket = open_ones.setdefault(kind, [])
        bucket.append(parameter)
        if sum(one.numel() * one.element_size() for one in bucket) >= bucket_bytes:
            yield open_ones.pop(kind)
    yield from open_ones.values()


@dataclass(slots=True)
class _Bucket:
    """Gradients that travel together."""

    parameters: list[nn.Parameter]
    waiting: int = 0
    flat: torch.Tensor | None = None
    work: Any = None

    def values(self) -> list[torch.Tensor]:
        """Each parameter's part of the bucket, in its shape."""
        assert self.flat is not None
        parts = torch.split(self.flat[: -len(self.parameters)], [one.numel() for one in self.parameters])
        return [part.view(one.shape) for part, one in zip(parts, self.parameters, strict=True)]


class GradientSum:
    """One worker's sums."""

    def __init__(
        self,
        stages: Mapping[int, Sequence[nn.Parameter]],
        *,
        data_group: Any = None,
        tied: Sequence[tuple[nn.Parameter, Any]] = (),
        overlap: bool = False,
    ) -> None:
        """``stages``: trainable parameters by stage; ``tied``: parameters with the group of their holders.

        ``overlap``: one stage whose backward is not split, so that buckets may leave inside its last backward.
        """
        self._data_group = data_group
        self._tied = list(tied)
        self._armed = False
        self._num_bytes = {"data": 0, "tied": 0}
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._stages = {stage: list({id(one): one for one in held}.values()) for stage, held in stages.items()}
        self._done: set[int] = set()
        self._hooks: list[Any] = []
        if data_group is None:
            return
        placed: set[int] = set()
        for stage in sorted(self._stages, reverse=True):  # backward reaches the last stage first
            fresh = [one for one in reversed(self._stages[stage]) if id(one) not in placed]
            placed.update(map(id, fresh))
            for together in in_buckets(fresh, BUCKET_BYTES):
                bucket = _Bucket(together)
                self._buckets.append(bucket)
                self._bucket_of.update((id(one), bucket) for one in together)
        if overlap:
            for parameter in {id(one): one for held in self._stages.values() for one in held}.values():
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._arrived))  # type: ignore[no-untyped-call]

    def last_backward(self, stage: int) -> None:
        """The backward that is about to begin is the stage's last: buckets may leave inside it."""
        self._armed = True
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters)

    def _arrived(self, parameter: torch.Tensor) -> None:
        bucket = self._bucket_of.get(id(parameter))
        if not self._armed or bucket is None or bucket.work is not None:
            return
        bucket.waiting -= 1
        if bucket.waiting == 0:
            for one in itertools.takewhile(lambda one: one.waiting == 0, self._buckets):
                if one.work is None:
                    self._leave(one)

    def stage_done(self, stage: int) -> None:
        """All gradients of a stage are there; what belongs to finished stages alone may leave."""
        self._done.add(stage)
        if self._data_group is None:
            return
        open_ones = {id(one) for other, held in self._stages.items() if other not in self._done for one in held}
        for bucket in self._buckets:
            if bucket.work is None and not any(id(one) in open_ones for one in bucket.parameters):
                self._leave(bucket)

    def _leave(self, bucket: _Bucket) -> None:
        """Send a bucket: each parameter has its place, also one without a gradient here, and a mark whether it has one.

        So buckets are of one length on all replicas, and a parameter that no sample of any replica used keeps none.
        """
        had = [one.grad is not None for one in bucket.parameters]
        parts = [(torch.zeros_like(one) if one.grad is None else one.grad).reshape(-1) for one in bucket.parameters]
        first = bucket.parameters[0]
        bucket.flat = torch.cat([*parts, torch.tensor(had, dtype=first.dtype, device=first.device)])
        del parts
        for parameter, value, there in zip(bucket.parameters, bucket.values(), had, strict=True):
            if there:
                parameter.grad = value
        num_bytes = bucket.flat.numel() * bucket.flat.element_size()
        self._num_bytes["data"] += num_bytes
        done = recorder.beside(num_bytes, "data")
        bucket.work = dist.all_reduce(bucket.flat, group=self._data_group, async_op=True)
        if recorder.is_recording:
            bucket.work.get_future().add_done_callback(lambda _: done())

    def finish(self) -> dict[str, int]:
        """Wait for all sums and put them back; the bytes that this worker gave to them, over replicas and tied."""
        if self._data_group is not None:
            for bucket in self._buckets:
                if bucket.work is None:
                    self._leave(bucket)
            for bucket in self._buckets:
                if bucket.work:
                    start = recorder.now()
                    bucket.work.wait()
                    recorder.add("collective", start, note="data")
                    self._give(bucket)
                bucket.work, bucket.flat, bucket.waiting = None, None, 0
        for parameter, group in self._tied:
            start = recorder.now()
            holders = torch.tensor([parameter.grad is not None], dtype=torch.float32, device=parameter.device)
            dist.all_reduce(holders, group=group)
            if not holders.item():  # no loss reaches it: it keeps none
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            num_bytes = parameter.grad.numel() * parameter.grad.element_size()
            dist.all_reduce(parameter.grad, group=group)
            recorder.add("collective", start, num_bytes=num_bytes, note="tied")
            self._num_bytes["tied"] += num_bytes
        self._armed = False
        self._done.clear()
        sent, self._num_bytes = self._num_bytes, dict.fromkeys(self._num_bytes, 0)
        return sent

    @staticmethod
    def _give(bucket: _Bucket) -> None:
        """A gradient to parameters that had none here, where another replica had one."""
        assert bucket.flat is not None
        if all(one.grad is not None for one in bucket.parameters):
            return
        marks = bucket.flat[-len(bucket.parameters) :].tolist()
        for parameter, value, mark in zip(bucket.parameters, bucket.values(), marks, strict=True):
            if mark and parameter.grad is None:
                parameter.grad = value

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
