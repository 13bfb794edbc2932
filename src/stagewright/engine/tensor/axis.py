"""The tensor axis of one worker, and the autograd operations at the ends of tensor-parallel regions and blocks.

                           forward          backward
    copy_to_region         identity         all-reduce       where a replicated activation enters the region
    reduce_from_region     all-reduce       identity         where the partial sums leave it
    share                  1/n              identity         what each worker adds of a bias to its partial sum

    gather_to_region       all-gather       reduce-scatter   the same two where the sequence is divided around the
    scatter_from_region    reduce-scatter   all-gather       region
    gather_replicated      all-gather       own shard        the first where each worker computes the same at first
    divide_sequence        own shard        all-gather       where a replicated activation enters a block
    join_sequence          all-gather       own shard        where a divided one leaves it
    enter_island           all-gather       own shard        the same two around what every worker computes whole
    leave_island           own shard        all-gather       inside a block, such as a mixture of experts

All traffic of the tensor axis in a step goes through ``TensorAxis.all_reduce``, ``all_gather_shards`` and
``reduce_scatter_shards``, which count it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stagewright.engine.worker.recorder import recorder
from stagewright.errors import UsageError

SEQUENCE_DIM = 1
"""The dimension of tokens in hidden states."""


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

    def copy_to_region(self, value: torch.Tensor) -> torch.Tensor:
        """Pass a replicated activation into a region; backward all-reduces its gradient."""
        if not (torch.is_grad_enabled() and value.requires_grad):
            return value
        return _CopyToRegion.apply(value, self)  # type: ignore[no-any-return, no-untyped-call]


class TensorAxis(Axis):
    """This worker's membership in the tensor axis."""

    def __init__(self, group: Any) -> None:
        super().__init__(group, "tensor")

    def reduce_from_region(self, partial: torch.Tensor) -> torch.Tensor:
        """All-reduce the workers' partial sums, in place."""
        return _ReduceFromRegion.apply(partial, self)  # type: ignore[no-any-return, no-untyped-call]

    def share(self, value: torch.Tensor) -> torch.Tensor:
        """Return this worker's share of a replicated value that is added to a partial sum; its gradient is whole."""
        return _Share.apply(value, self.num_workers)  # type: ignore[no-any-return, no-untyped-call]

    def reduce_values(self, value: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """All-reduce, in place, what autograd does not follow, such as the sums of a divided loss."""
        return self.all_reduce(value, op)

    def gather_shards(self, shard: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        """All-gather, without autograd, what is needed whole, such as divided logits."""
        return self.all_gather_shards(shard, sizes, dim)

    def gather_to_region(self, shard: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Pass shards of a sequence into a region, whole; backward reduce-scatters the gradient."""
        return _Exchange.apply(shard, self, sizes, "all_gather_shards", "reduce_scatter_shards")  # type: ignore[no-any-return, no-untyped-call]

    def scatter_from_region(self, partial: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Sum the workers' partial sums and keep this worker's shard of the sequence."""
        return _Exchange.apply(partial, self, sizes, "reduce_scatter_shards", "all_gather_shards")  # type: ignore[no-any-return, no-untyped-call]

    def gather_replicated(self, shard: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Pass shards of a sequence, whole, to replicated layers of a region; their gradient is whole."""
        return _Exchange.apply(shard, self, sizes, "all_gather_shards", "own_shard")  # type: ignore[no-any-return, no-untyped-call]

    def divide_sequence(self, value: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return this worker's shard of a replicated activation."""
        return _Exchange.apply(value, self, sizes, "own_shard", "all_gather_shards")  # type: ignore[no-any-return, no-untyped-call]

    def join_sequence(self, shard: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return the whole of a divided activation, on every worker."""
        return _Exchange.apply(shard, self, sizes, "all_gather_shards", "own_shard")  # type: ignore[no-any-return, no-untyped-call]

    def enter_island(self, shard: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return the whole of a divided activation, for what every worker computes alike inside a block."""
        return _Exchange.apply(shard, self, sizes, "all_gather_shards", "own_shard")  # type: ignore[no-any-return, no-untyped-call]

    def leave_island(self, value: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return this worker's shard of what every worker has computed alike."""
        return _Exchange.apply(value, self, sizes, "own_shard", "all_gather_shards")  # type: ignore[no-any-return, no-untyped-call]

    def own_shard(self, whole: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        """Copy this worker's shard of ``sizes`` along ``dim``, so that the whole tensor can be freed."""
        return whole.narrow(dim, sum(sizes[: self.index]), sizes[self.index]).clone()

    def all_gather_shards(self, shard: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        """All-gather shards of ``sizes`` along ``dim`` and return the whole tensor, whose bytes are counted."""
        start = recorder.now()
        shards = self.all_gather(pad_shard(shard, max(sizes), dim))
        whole = torch.cat([part.narrow(dim, 0, size) for part, size in zip(shards, sizes, strict=True)], dim)
        self.payload_bytes += whole.nbytes
        recorder.add("collective", start, num_bytes=whole.nbytes, note=self.name)
        return whole

    def reduce_scatter_shards(self, whole: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        """Sum a tensor over the workers and return this worker's shard; the bytes of the whole are counted."""
        start = recorder.now()
        parts = torch.stack([pad_shard(part, max(sizes), dim) for part in torch.split(whole, list(sizes), dim)])
        total = torch.empty_like(parts[0])
        scatter = reduce_scatter if whole.device.type != "cpu" else all_to_all_and_sum
        scatter(total, parts, group=self.group)
        self.payload_bytes += whole.nbytes
        recorder.add("collective", start, num_bytes=whole.nbytes, note=self.name)
        return total.narrow(dim, 0, sizes[self.index])


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, axis: Axis) -> torch.Tensor:
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


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, num_workers: int) -> torch.Tensor:
        return value / num_workers

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Exchange(torch.autograd.Function):
    """A change between a whole sequence and its shards, by the named methods of the axis."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, axis: TensorAxis, sizes: Sequence[int], run: str, reverse: str
    ) -> torch.Tensor:
        ctx.axis, ctx.sizes, ctx.reverse = axis, sizes, reverse
        return getattr(axis, run)(value, sizes, SEQUENCE_DIM)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return getattr(ctx.axis, ctx.reverse)(gradient, ctx.sizes, SEQUENCE_DIM), None, None, None, None


# Newer torch renames this and warns about the old name.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_to_all_and_sum(output_tensor: torch.Tensor, input_tensor: torch.Tensor, *, group: Any, **_: Any) -> None:
    """Reduce-scatter by all-to-all: Gloo's reduce-scatter is an all-reduce that discards the rest, twice the bytes."""
    shards = torch.empty_like(input_tensor)
    dist.all_to_all_single(shards, input_tensor, group=group)
    torch.sum(shards.view(-1, output_tensor.numel()), dim=0, out=output_tensor.view(-1))


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
