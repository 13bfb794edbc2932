"""One replica of the data axis: what replicated and sharded ones have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stagewright.engine.data.gradients import in_buckets
from stagewright.engine.tensor.axis import Traffic
from stagewright.engine.worker.recorder import recorder

__all__ = ["DataParallel"]


class DataParallel:
    """One replica: call it like the module, run backward, then ``synchronise``."""

    def __init__(self, module: nn.Module, group: Any, norms: list[Any]) -> None:
        self.module = module
        """The plain module; its parameters are what optimisers take."""
        self.group = group
        self.num_replicas: int = dist.get_world_size(group)
        self.index: int = dist.get_rank(group)
        self.traffic = Traffic()
        """What passed the data axis."""
        self._norms = norms

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def parameters(self) -> Iterator[nn.Parameter]:
        """What an optimiser takes."""
        return self.module.parameters()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Forward and backward in this block add to the gradients without exchanging them: all but the last chunk."""
        yield

    def synchronise(self, weight: float) -> None:
        """End a step: whatever backward has not exchanged; ``weight`` is this replica's share of the whole batch."""
        self._average_statistics(weight)

    @torch.no_grad()
    def _average_statistics(self, weight: float) -> None:
        """Running statistics of all batch norms, averaged over replicas by weight, in one message."""
        norms = [norm for norm in self._norms if norm.training]
        buffers = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
        if not buffers:
            return
        flat = torch.cat([buffer.reshape(-1).double() for buffer in buffers]) * weight
        self._sum(flat)
        for buffer, value in zip(buffers, torch.split(flat, [one.numel() for one in buffers]), strict=True):
            buffer.copy_(value.view_as(buffer))

    def _sum(self, flat: torch.Tensor) -> torch.Tensor:
        num_bytes = flat.numel() * flat.element_size()
        self.traffic.add_all_reduce(num_bytes, self.num_replicas)
        start = recorder.now()
        dist.all_reduce(flat, group=self.group)
        recorder.add("collective", start, num_bytes=num_bytes, note="data")
        return flat

    def _used(self, trained: list[nn.Parameter], lacked: set[int]) -> list[nn.Parameter]:
        """Those that any replica used; of the others, zeros that stood for a gradient are taken away.

        ``lacked``: which had none on this replica, whatever they have by now.
        """
        had = [one.grad is not None and id(one) not in lacked for one in trained]
        if not had:
            return []
        marks = self._sum(torch.tensor(had, dtype=torch.int64).to(trained[0].device))
        if all(had):
            return trained  # without reading the sum: a GPU need not be waited for
        counts = marks.tolist()
        for one, count in zip(trained, counts, strict=True):
            if not count:
                one.grad = None
        return [one for one, count in zip(trained, counts, strict=True) if count]

    def _sum_gradients(self, parameters: Iterable[nn.Parameter], bucket_bytes: int) -> None:
        """Sum gradients by hand; one that is missing here counts as zeros."""
        for bucket in in_buckets(parameters, bucket_bytes):
            flat = torch.cat([(torch.zeros_like(one) if one.grad is None else one.grad).reshape(-1) for one in bucket])
            self._sum(flat)
            for one, value in zip(bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True):
                if one.grad is None:
                    one.grad = torch.empty_like(one)
                one.grad.copy_(value.view_as(one))
