"""All-reduce gradients over the workers that hold the same parameter: replicas (data axis) and tied-weight stages.

    a stage's last backward ──► buckets of gradients, all-reduced while other stages compute ──► finished at the end
    tied weights (embedding and head on two workers) ──► all-reduced over their holders, after that

Losses are weighted by samples over the global batch, so gradients are *summed*, not averaged: a replica with fewer
samples contributes less by itself. If a worker has one stage and backward is not split, a bucket is sent inside the
last backward pass, as soon as its last gradient is ready and the previous bucket is sent (collectives must have the
same order on all replicas); otherwise when its stage is done. From then on gradients are views of their bucket:
nothing is copied back, and the memory overhead is one bucket, not a second copy of all gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from stagewright.engine.worker.recorder import recorder

BUCKET_BYTES = 8 << 20  # large enough to saturate a link, small enough to start early


def tied_weight_holders(
    names_of_stages: Sequence[Iterable[str]], stage_workers: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Return the workers that hold each tied weight, by its name: parameters of several pipeline workers."""
    holders: dict[str, set[int]] = {}
    for worker, names in zip(stage_workers, names_of_stages, strict=True):
        for name in names:
            holders.setdefault(name, set()).add(worker)
    return {name: tuple(sorted(workers)) for name, workers in holders.items() if len(workers) > 1}


def all_reduce_tied(tied: Iterable[tuple[nn.Parameter, Any]], repeated: frozenset[int] = frozenset()) -> int:
    """Sum the gradients of tied weights over the process groups of their holders; return the payload bytes.

    Holders of one weight have the same shard of it. ``repeated``: weights, by identity, whose gradient another worker
    of the group has too, and sums for this one.
    """
    num_bytes = 0
    for parameter, group in tied:
        start = recorder.now()
        num_gradients = torch.tensor([parameter.grad is not None], dtype=torch.float32, device=parameter.device)
        dist.all_reduce(num_gradients, group=group)
        if not num_gradients.item():  # no loss reaches it: it keeps no gradient
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        if id(parameter) in repeated:
            gradient.zero_()
        if gradient.numel():  # a shard may be empty
            dist.all_reduce(gradient, group=group)
        recorder.add("collective", start, num_bytes=gradient.nbytes, note="tied")
        num_bytes += gradient.nbytes
    return num_bytes


def bucket_parameters(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Yield buckets of parameters of one dtype and device, up to a size, in the order in which they fill up."""
    partial: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kind = parameter.dtype, parameter.device
        bucket = partial.setdefault(kind, [])
        bucket.append(parameter)
        if sum(member.numel() * member.element_size() for member in bucket) >= bucket_bytes:
            yield partial.pop(kind)
    yield from partial.values()


@dataclass(slots=True)
class _Bucket:
    """Gradients that are all-reduced together."""

    parameters: list[nn.Parameter]
    num_pending: int = 0
    """Gradients that the last backward has not produced yet."""
    flat: torch.Tensor | None = None
    """All gradients, then one flag per parameter: whether it has a gradient."""
    work: Any = None

    def gradients(self) -> list[torch.Tensor]:
        """Return views of the bucket, one per parameter, in its shape."""
        assert self.flat is not None
        sizes = [parameter.numel() for parameter in self.parameters]
        chunks = torch.split(self.flat[: -len(self.parameters)], sizes)
        return [chunk.view(parameter.shape) for chunk, parameter in zip(chunks, self.parameters, strict=True)]


class GradientAllReduce:
    """Gradient all-reduces of one worker."""

    def __init__(
        self,
        stages: Mapping[int, Sequence[nn.Parameter]],
        *,
        data_group: Any = None,
        tied: Sequence[tuple[nn.Parameter, Any]] = (),
        repeated: frozenset[int] = frozenset(),
        overlap: bool = False,
    ) -> None:
        """``stages``: trainable parameters by stage; ``tied``: tied weights with the process group of their holders.

        ``repeated``: see ``all_reduce_tied``.
        ``overlap``: there is one stage whose backward is not split, so buckets may be sent inside its last backward.
        """
        self._data_group = data_group
        self._tied, self._repeated = list(tied), repeated
        self._in_last_backward = False
        self._num_bytes = {"data": 0, "tied": 0}
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._stages = {stage: list({id(value): value for value in held}.values()) for stage, held in stages.items()}
        self._done: set[int] = set()
        self._hooks: list[Any] = []
        if data_group is None:
            return
        placed: set[int] = set()
        for stage in sorted(self._stages, reverse=True):  # backward reaches the last stage first
            unplaced = [parameter for parameter in reversed(self._stages[stage]) if id(parameter) not in placed]
            placed.update(map(id, unplaced))
            for members in bucket_parameters(unplaced, BUCKET_BYTES):
                bucket = _Bucket(members)
                self._buckets.append(bucket)
                self._bucket_of.update((id(parameter), bucket) for parameter in members)
        if overlap:
            for parameter in {id(value): value for held in self._stages.values() for value in held}.values():
                hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def last_backward(self, stage: int) -> None:
        """Announce the last backward of a stage: buckets may be sent inside it."""
        self._in_last_backward = True
        for bucket in self._buckets:
            bucket.num_pending = len(bucket.parameters)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        bucket = self._bucket_of.get(id(parameter))
        if not self._in_last_backward or bucket is None or bucket.work is not None:
            return
        bucket.num_pending -= 1
        if bucket.num_pending == 0:
            for ready in itertools.takewhile(lambda bucket: bucket.num_pending == 0, self._buckets):
                if ready.work is None:
                    self._send(ready)

    def stage_done(self, stage: int) -> None:
        """Send all buckets whose parameters belong to finished stages only."""
        self._done.add(stage)
        if self._data_group is None:
            return
        unfinished = [held for other, held in self._stages.items() if other not in self._done]
        incomplete = {id(parameter) for held in unfinished for parameter in held}
        for bucket in self._buckets:
            if bucket.work is None and not any(id(parameter) in incomplete for parameter in bucket.parameters):
                self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        """Start the all-reduce of a bucket, with zeros for missing gradients and a flag per parameter.

        So a bucket has the same length on all replicas, and a parameter that no replica used keeps no gradient.
        """
        has_gradient = [parameter.grad is not None for parameter in bucket.parameters]
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in bucket.parameters]
        first = bucket.parameters[0]
        flags = torch.tensor(has_gradient, dtype=first.dtype, device=first.device)
        bucket.flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), flags])
        del gradients
        for parameter, gradient, used in zip(bucket.parameters, bucket.gradients(), has_gradient, strict=True):
            if used:
                parameter.grad = gradient
        self._num_bytes["data"] += bucket.flat.nbytes
        done = recorder.begin_overlapped(bucket.flat.nbytes, "data")
        bucket.work = dist.all_reduce(bucket.flat, group=self._data_group, async_op=True)
        if recorder.is_recording:
            bucket.work.get_future().add_done_callback(lambda _: done())

    def finish(self) -> dict[str, int]:
        """Wait for all buckets and all-reduce tied weights; return the payload bytes, by ``data`` and ``tied``."""
        if self._data_group is not None:
            for bucket in self._buckets:
                if bucket.work is None:
                    self._send(bucket)
            for bucket in self._buckets:
                if bucket.work:
                    start = recorder.now()
                    bucket.work.wait()
                    recorder.add("collective", start, note="data")
                    self._set_missing_gradients(bucket)
                bucket.work, bucket.flat, bucket.num_pending = None, None, 0
        self._num_bytes["tied"] += all_reduce_tied(self._tied, self._repeated)
        self._in_last_backward = False
        self._done.clear()
        sent, self._num_bytes = self._num_bytes, dict.fromkeys(self._num_bytes, 0)
        return sent

    @staticmethod
    def _set_missing_gradients(bucket: _Bucket) -> None:
        """Set the gradient of parameters that only other replicas used."""
        assert bucket.flat is not None
        if all(parameter.grad is not None for parameter in bucket.parameters):
            return
        flags = bucket.flat[-len(bucket.parameters) :].tolist()
        for parameter, gradient, flag in zip(bucket.parameters, bucket.gradients(), flags, strict=True):
            if flag and parameter.grad is None:
                parameter.grad = gradient

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
