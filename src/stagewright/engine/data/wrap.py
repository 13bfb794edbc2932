"""Data parallelism: each replica computes some samples, gradients are summed over replicas.

    DDPReplica     DistributedDataParallel: gradient buckets, all-reduced during backward
    FSDPReplica    FSDP2: parameters, gradients and optimizer states sharded; parameters all-gathered unit by unit
    wrap_stages    FSDP2 for the stages of a pipeline, and for inference
    (ZeRO-1 and ZeRO-2 need no wrapper: see ``zero``)

A loss must be weighted by its share of the global batch (n_i / B), as everywhere in the engine. So gradients are
*summed* and equal those of the single-device baseline on the global batch, even for unequal shares. A replica without
a sample must still take part: give it any sample with weight 0.

Unused parameters: replicas may use different parameters (data-dependent routing), and different ones in each step. A
parameter that one replica did not use counts as zeros there; one that no replica used has no gradient, as in the
baseline. So each step ends with an all-reduce of one flag per parameter. Parameters that no replica used in the first
step, which runs without DDP buckets, are all-reduced after backward in later steps too, so that nothing waits for them.

Batch norm: each replica normalizes its own samples; running statistics are averaged over replicas by weight after each
step. The running mean then equals the baseline's; the running variance lacks the variance between the replicas' means
(deferred mode in ``batch_norm`` includes it). All replicas, checkpoints and comparisons see the same statistics. Other
buffers are local to a replica; those of replica 0 are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from stagewright.engine.batch.batch_norm import find_tracked_norms
from stagewright.engine.data.data_parallel import DataParallelReplica
from stagewright.engine.data.ddp import DDPReplica
from stagewright.engine.data.fsdp import FSDPReplica
from stagewright.engine.data.fsdp_step import StepFSDPReplica
from stagewright.engine.data.gradient_allreduce import BUCKET_BYTES
from stagewright.engine.data.hsdp import ShardGroups
from stagewright.engine.tensor.axis import process_group_of
from stagewright.engine.worker.broadcast import broadcast
from stagewright.errors import UsageError


def wrap_data_parallel(
    module: nn.Module,
    axis: Any,
    *,
    device: torch.device | None = None,
    shard: bool = False,
    units: Iterable[nn.Module] = (),
    bucket_bytes: int = BUCKET_BYTES,
    average_batch_norm: bool = True,
    read_weights: Callable[[nn.Module], None] | None = None,
    divided: Container[int] = (),
    groups: ShardGroups | None = None,
    on_change: Callable[[], None] = lambda: None,
) -> DataParallelReplica:
    """Make this worker's module one replica of the data axis, a process group or a one-dimensional device mesh.

    Every replica receives replica 0's parameters and buffers. ``device``: the device to run on, if parameters are
    still on the host; default: their device. ``shard``: use FSDP2, with one parameter group per unit and one for the
    rest; create optimizers afterwards, from ``parameters()`` of the result. ``average_batch_norm=False`` leaves
    running statistics to deferred mode. ``read_weights``: with FSDP2, read the parameters of a unit before it is
    sharded, instead of receiving them. ``divided``: identities of parameters that replicas do not have in common, such
    as those of experts; they are left alone. ``groups``: with HSDP, the groups within which FSDP2 shards.
    ``on_change``: see ``ShardedReplica``.
    """
    if bucket_bytes < 1:
        raise UsageError(f"bucket_bytes must be 1 or more, not {bucket_bytes}")
    group = process_group_of(axis)
    device = device or next(module.parameters()).device
    received = module.buffers() if read_weights is not None else (*module.parameters(), *module.buffers())
    broadcast_from_first((tensor for tensor in received if id(tensor) not in divided), group, device)
    norms = find_tracked_norms(module) if average_batch_norm else []
    if not shard:
        return DDPReplica(module, group, norms, bucket_bytes, divided)
    mesh, replicate = _mesh_of(axis, device, groups), groups and groups.replicate
    return FSDPReplica(
        module, group, norms, mesh, units, device, read_weights, replicate=replicate, on_change=on_change
    )


class FSDPStages(DataParallelReplica):
    """The stages of a worker, each an FSDP2 module of its own, gathered for each pass of each micro-batch."""

    def __init__(self, module: nn.Module, group: Any) -> None:
        super().__init__(module, group, [])
        self.replicas: dict[int, FSDPReplica] = {}
        """The replicas through which the forwards of these stages must run, by stage."""

    def gathered_parameters(self) -> list[nn.Parameter]:
        """Return the full parameters of all stages; see ``ShardedReplica``."""
        return [parameter for replica in self.replicas.values() for parameter in replica.gathered_parameters()]

    def synchronize(self, weight: float) -> None:
        for replica in self.replicas.values():
            replica.synchronize(weight)


def wrap_stages(
    stages: Mapping[int, nn.Module],
    axis: Any,
    *,
    device: torch.device,
    units: Iterable[nn.Module],
    every_microbatch: bool,
    average_batch_norm: bool = True,
    read_weights: Callable[[nn.Module], None] | None = None,
    on_change: Callable[[], None] = lambda: None,
    groups: ShardGroups | None = None,
) -> FSDPStages | StepFSDPReplica:
    """Shard the parameters of a worker's stages over the replicas with FSDP2.

    ``every_microbatch``: gather them for each pass of each micro-batch instead of once per step. The others: see
    ``wrap_data_parallel``.
    """
    group, mesh, replicate = process_group_of(axis), _mesh_of(axis, device, groups), groups and groups.replicate
    together = nn.ModuleList(stages.values())
    received = together.buffers() if read_weights is not None else (*together.parameters(), *together.buffers())
    broadcast_from_first(received, group, device)
    if not every_microbatch:
        norms = find_tracked_norms(together) if average_batch_norm else []
        return StepFSDPReplica(
            stages, group, norms, mesh, units, device, read_weights, on_change=on_change, replicate=replicate
        )
    result, units = FSDPStages(together, group), list(units)
    for index, stage in stages.items():
        inside = set(stage.modules())
        result.replicas[index] = FSDPReplica(
            stage,
            group,
            find_tracked_norms(stage) if average_batch_norm else [],
            mesh,
            [unit for unit in units if unit in inside],
            device,
            read_weights,
            every_microbatch=True,
            counter=result,
            replicate=replicate,
            on_change=on_change,
        )
    return result


def _mesh_of(axis: Any, device: torch.device, groups: ShardGroups | None) -> DeviceMesh:
    """Return the device mesh along which FSDP2 shards."""
    if groups is None and isinstance(axis, DeviceMesh):
        return axis
    return DeviceMesh.from_group(axis if groups is None else groups.shard, device.type, mesh_dim_names=("data",))


def broadcast_from_first(tensors: Iterable[torch.Tensor], group: Any, device: torch.device) -> None:
    """Copy the first replica's values of these tensors to every replica."""
    unique = {id(tensor): tensor.detach() for tensor in tensors}
    for tensor, value in zip(unique.values(), broadcast(list(unique.values()), device, group=group), strict=True):
        tensor.copy_(value)
