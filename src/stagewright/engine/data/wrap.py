"""The data axis for one stage a worker: replicas that each compute some samples, their gradients summed.

    Replicated    DistributedDataParallel: buckets, all-reduced while backward goes on
    Sharded       FSDP2: parameters, gradients and optimiser state divided, gathered unit by unit where they are used

A loss must carry its share of the whole batch (n_i / B), as everywhere in the engine; so gradients are *summed* and
equal serial's on the whole batch, however unequal the shares are. A replica without a sample must still take part:
give it any sample with the weight 0.

Unused parameters: replicas may use different ones (routing by data), in each step others. One that a replica did not
use counts as zeros there; one that no replica used has no gradient, as in serial. So each step ends with a mark for
every parameter, summed. Those that no replica used in the first step, which is reduced by hand, are summed by hand in
later ones, too, where they are used: nothing waits for them.

Batch norm: each replica normalises its own samples; running statistics are averaged over replicas by weight after each
step. The running mean is then serial's; the running variance lacks what the replicas' means differ by (deferred mode in
``batch_norm`` has it). All replicas, checkpoints and comparisons see the same numbers. Other buffers are each replica's
own; those of replica 0 count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from stagewright.engine.batch.batch_norm import tracked_norms
from stagewright.engine.data.data_parallel import DataParallel
from stagewright.engine.data.ddp import Replicated
from stagewright.engine.data.fsdp import Sharded
from stagewright.engine.data.gradients import BUCKET_BYTES
from stagewright.engine.tensor.axis import group_of
from stagewright.engine.worker.broadcast import broadcast
from stagewright.errors import UsageError

__all__ = ["wrap_data_parallel"]


def wrap_data_parallel(
    module: nn.Module,
    axis: Any,
    *,
    place: torch.device | None = None,
    shard: bool = False,
    units: Iterable[nn.Module] = (),
    bucket_bytes: int = BUCKET_BYTES,
    average_batch_norm: bool = True,
) -> DataParallel:
    """Make this worker's module one replica of the data axis, a process group or a mesh of one dimension.

    Every replica gets replica 0's parameters and buffers. ``place``: the device to run on, while parameters may still
    be on the host; None: where they are. ``shard``: FSDP2, with ``units`` gathered one by one and the rest as a whole;
    optimisers must be made afterwards, from ``parameters()`` of the result. ``average_batch_norm=False`` leaves
    running statistics to deferred mode.
    """
    if bucket_bytes < 1:
        raise UsageError(f"buckets of {bucket_bytes} bytes are too small; use 1 or more")
    group = group_of(axis)
    place = place or next(module.parameters()).device
    _take_from_first(module, group, place)
    norms = tracked_norms(module) if average_batch_norm else []
    if shard:
        mesh = axis if isinstance(axis, DeviceMesh) else _mesh(group, place)
        return Sharded(module, group, norms, mesh, units, place)
    return Replicated(module, group, norms, bucket_bytes)


@torch.no_grad()
def _take_from_first(module: nn.Module, group: Any, place: torch.device) -> None:
    """Replica 0's parameters and buffers, to all."""
    tensors = [one.detach() for one in {id(one): one for one in (*module.parameters(), *module.buffers())}.values()]
    values = broadcast(tensors, place, group=group)
    for tensor in tensors:
        tensor.copy_(next(values))


def _mesh(group: Any, place: torch.device) -> DeviceMesh:
    return DeviceMesh.from_group(group, place.type, mesh_dim_names=("data",))
