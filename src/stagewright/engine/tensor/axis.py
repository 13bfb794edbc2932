"""The tensor axis of one worker, and the two autograd operations at the ends of a tensor-parallel region.

                           forward        backward
    copy_to_region         identity       all-reduce      where a replicated activation enters the region
    reduce_from_region     all-reduce     identity        where the partial sums leave it

All traffic of the tensor axis in a step goes through ``TensorAxis.all_reduce`` and ``gather_shards``, which count it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stagewright.engine.worker.recorder import recorder
from stagewright.errors import UsageError


class Axis:
    """This worker's membership in one axis of the mesh."""

    def __init__(self, group: Any, name: str) -> None:
        self.group, self.name = group, name
        self.num_workers: int = dist.get_world_size(group)
        self.index: int = dist.get_rank(group)
        self.payload_bytes = 0
        """Bytes of the tensors that this worker passed to collectives since it was set to 0."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return self: a copy of a model communicates through the same group."""
        return self

    def all_reduce(self, value: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Sum ``value`` in place over the workers, or reduce it by another operation."""
        self.payload_bytes += value.nbytes
        start = recorder.now()
        dist.all_reduce(value, op=op, group=self.group)
        recorder.add("collective", start, num_bytes=value.nbytes, note=self.name)
        return value

    def all_gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Return every worker's value, in rank order; not counted: only small values and those of no training step."""
        value = value.contiguous()
        values = [torch.empty_like(value) for _ in range(self.num_workers)]
        dist.all_gather(values, value, group=self.group)
        return values


class TensorAxis(Axis):
    """This worker's membership in the tensor axis."""

    def __init__(self, group: Any) -> None:
        super().__init__(group, "tensor")

    def copy_to_region(self, value: torch.Tensor) -> torch.Tensor:
        """Pass a replicated activation into a region; backward all-reduces its gradient."""
        if not (torch.is_grad_enabled() and value.requires_grad):
            return value
        return _CopyToRegion.apply(value, self)  # type: ignore[no-any-return, no-untyped-call]

    def reduce_from_region(self, partial: torch.Tensor) -> torch.Tensor:
        """All-reduce the workers' partial sums, in place."""
        return _ReduceFromRegion.apply(partial, self)  # type: ignore[no-any-return, no-untyped-call]

    def reduce_values(self, value: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """All-reduce, in place, what autograd does not follow, such as the sums of a divided loss."""
        return self.all_reduce(value, op)

    def gather_shards(self, shard: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        """All-gather shards of ``sizes`` along ``dim`` and return the whole tensor, whose bytes are counted."""
        start = recorder.now()
        shards = self.all_gather(pad_shard(shard, max(sizes), dim))
        whole = torch.cat([part.narrow(dim, 0, size) for part, size in zip(shards, sizes, strict=True)], dim)
        self.payload_bytes += whole.nbytes
        recorder.add("collective", start, num_bytes=whole.nbytes, note=self.name)
        return whole


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
        ctx.axis = axis
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Clone: autograd may pass the same gradient tensor to other nodes.
        return ctx.axis.all_reduce(gradient.clone(memory_format=torch.contiguous_format)), None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
        ctx.mark_dirty(partial)
        if partial.is_contiguous():
            return axis.all_reduce(partial)
        return partial.copy_(axis.all_reduce(partial.contiguous()))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def shard_sizes(total: int, num_workers: int) -> tuple[int, ...]:
    """Divide ``total`` into shards that differ by at most 1, the larger ones first."""
    return tuple(total // num_workers + (index < total % num_workers) for index in range(num_workers))


def pad_shard(shard: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """Return the shard with zeros appended along ``dim``, because collectives need equal shapes."""
    if shard.shape[dim] == size:
        return shard
    shape = list(shard.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([shard, shard.new_zeros(shape)], dim)


def process_group_of(axis: Any) -> Any:
    """Return the process group of an axis, given as a group or as a one-dimensional device mesh."""
    if not isinstance(axis, DeviceMesh):
        return axis
    if axis.ndim != 1:
        names = axis.mesh_dim_names
        raise UsageError(
            f"expected a one-dimensional device mesh, got {axis.ndim} dimensions "
            f"({', '.join(names) if names else 'unnamed'}); pass one of them, e.g. mesh['tensor']"
        )
    return axis.get_group()
