"""The workers that share a model's layers, and the two operations between them, as autograd sees them.

              forward        backward
    copy      as it is       all-reduce      where a replicated value enters a region of split layers
    reduce    all-reduce     as it is        where the parts' partial sums leave it

Every byte of the tensor axis passes through ``TensorAxis.all_reduce``, which counts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stagewright.engine.worker.recorder import recorder
from stagewright.errors import UsageError

__all__ = ["TensorAxis", "Traffic", "group_of"]


@dataclass(slots=True)
class Traffic:
    """What one worker handed to the collectives of one axis since ``reset``."""

    num_collectives: int = 0
    """Calls."""
    payload_bytes: int = 0
    """Bytes of the tensors handed over."""
    sent_bytes: int = 0
    """Bytes that leave this worker if the collective runs on a ring: 2 (n - 1) / n of an all-reduce's payload."""

    def add_all_reduce(self, payload_bytes: int, num_workers: int) -> None:
        """Count one all-reduce."""
        self._add(payload_bytes, 2 * (num_workers - 1) * payload_bytes // num_workers)

    def add_half(self, payload_bytes: int, num_workers: int) -> None:
        """Count one all-gather or reduce-scatter, the halves of an all-reduce."""
        self._add(payload_bytes, (num_workers - 1) * payload_bytes // num_workers)

    def _add(self, payload_bytes: int, sent_bytes: int) -> None:
        self.num_collectives += 1
        self.payload_bytes += payload_bytes
        self.sent_bytes += sent_bytes

    def reset(self) -> None:
        """Begin again at 0."""
        self.num_collectives = self.payload_bytes = self.sent_bytes = 0


class TensorAxis:
    """This worker's end of the tensor axis."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.num_workers: int = dist.get_world_size(group)
        self.index: int = dist.get_rank(group)
        self.traffic = Traffic()

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorAxis:
        """A copy of a model talks through the same group."""
        return self

    def copy(self, value: torch.Tensor) -> torch.Tensor:
        """A replicated value, whose gradient is the sum of what every worker finds."""
        if not (torch.is_grad_enabled() and value.requires_grad):
            return value
        return _Copy.apply(value, self)  # type: ignore[no-any-return, no-untyped-call]

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of every worker's partial result; overwrites ``partial``."""
        return _Reduce.apply(partial, self)  # type: ignore[no-any-return, no-untyped-call]

    def all_reduce(self, value: torch.Tensor) -> torch.Tensor:
        """Sum in place over the workers."""
        num_bytes = value.numel() * value.element_size()
        self.traffic.add_all_reduce(num_bytes, self.num_workers)
        start = recorder.now()
        dist.all_reduce(value, group=self.group)
        recorder.add("collective", start, num_bytes=num_bytes, note="tensor")
        return value

    def all_gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Every worker's value, in the workers' order; not counted, for no training step needs it."""
        value = value.contiguous()
        found = [torch.empty_like(value) for _ in range(self.num_workers)]
        dist.all_gather(found, value, group=self.group)
        return found


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
        ctx.axis = axis
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A clone: autograd may hand the same gradient to others.
        return ctx.axis.all_reduce(gradient.clone(memory_format=torch.contiguous_format)), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
        ctx.mark_dirty(partial)
        if partial.is_contiguous():
            return axis.all_reduce(partial)
        return partial.copy_(axis.all_reduce(partial.contiguous()))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def group_of(axis: Any) -> Any:
    """The process group of one axis, given as a group or as a mesh of one dimension."""
    if not isinstance(axis, DeviceMesh):
        return axis
    if axis.ndim != 1:
        names = axis.mesh_dim_names
        raise UsageError(
            f"the mesh has {axis.ndim} dimensions ({', '.join(names) if names else 'unnamed'}) where one is wanted; "
            "pass one of them, e.g. mesh['tensor']"
        )
    return axis.get_group()
