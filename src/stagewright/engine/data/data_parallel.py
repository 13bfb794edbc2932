"""One replica of the data axis: what DDP and FSDP replicas have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from stagewright.engine.data.gradient_allreduce import bucket_parameters
from stagewright.engine.tensor.axis import Axis


class DataParallelReplica(Axis):
    """One replica: call it like the module, run backward, then ``synchronize``."""

    def __init__(self, module: nn.Module, group: Any, norms: list[Any]) -> None:
        """``norms``: batch norms whose running statistics are averaged over replicas."""
        super().__init__(group, "data")
        self.module, self._norms = module, norms

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters for the optimizer."""
        return self.module.parameters()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate gradients in this block without communication: for all micro-batches but the last."""
        yield

    def synchronize(self, weight: float) -> None:
        """Finish a step: communicate what backward has not; ``weight`` is this replica's share of the global batch."""
        self._average_statistics(weight)

    @torch.no_grad()
    def _average_statistics(self, weight: float) -> None:
        """Average the running statistics of all batch norms over replicas, weighted, in one all-reduce."""
        norms = [norm for norm in self._norms if norm.training]
        buffers = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
        if not buffers:
            return
        flat = torch.cat([buffer.reshape(-1).double() for buffer in buffers]) * weight
        self.all_reduce(flat)
        for buffer, value in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(value.view_as(buffer))

    def _used_parameters(self, trained: list[nn.Parameter], unused_here: set[int]) -> list[nn.Parameter]:
        """Return the parameters that any replica used; drop the zero gradients of the others.

        ``unused_here``: identities of those without a gradient on this replica, before zeros were filled in.
        """
        used_here = [parameter.grad is not None and id(parameter) not in unused_here for parameter in trained]
        if not used_here:
            return []
        flags = self.all_reduce(torch.tensor(used_here, dtype=torch.int64).to(trained[0].device))
        if all(used_here):
            return trained  # without reading the flags, which would synchronize with the GPU
        counts = flags.tolist()
        for parameter, count in zip(trained, counts, strict=True):
            if not count:
                parameter.grad = None
        return [parameter for parameter, count in zip(trained, counts, strict=True) if count]

    def _all_reduce_gradients(self, parameters: Iterable[nn.Parameter], bucket_bytes: int) -> None:
        """All-reduce gradients in buckets, outside of backward; a missing gradient counts as zeros."""
        for bucket in bucket_parameters(parameters, bucket_bytes):
            gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in bucket]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            self.all_reduce(flat)
            values = torch.split(flat, [parameter.numel() for parameter in bucket])
            for parameter, value in zip(bucket, values, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(value.view_as(parameter))
