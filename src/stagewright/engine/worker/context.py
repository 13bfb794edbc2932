"""A worker's rank, mesh coordinates, device and process groups.

world rank = ((d · T) + t) · P + p        data d, tensor t, pipeline p; the pipeline is innermost
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from stagewright.cluster.device import Device
from stagewright.machine.gloo_threads import sched_batch_threads
from stagewright.spec.plan import Mesh

BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}
"""Backends by device type: NCCL between GPUs, with Gloo for host tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """One worker's rank, coordinates, device and groups."""

    rank: int
    """World rank."""
    mesh: Mesh
    data: int
    """Coordinate on the data axis."""
    tensor: int
    """Coordinate on the tensor axis."""
    pipeline: int
    """Coordinate on the pipeline axis."""
    device: Device
    torch_device: torch.device
    data_group: Any
    """Workers with the same stages in other replicas; ``None`` for one replica."""
    tensor_group: Any
    """Workers that share this stage's layers; ``None`` without tensor parallelism."""
    link_groups: Mapping[tuple[bool, bool], Any]
    """P2P groups of this pipeline, by (for gradients, towards a higher rank)."""
    pipeline_ranks: tuple[int, ...]
    """World ranks of this pipeline, in order."""

    def link_group(self, sender: int, receiver: int, *, backward: bool) -> Any:
        """Return the group for P2P sends from one worker of this pipeline to another.

        NCCL runs the operations of one pair in one group in order: if both directions shared a group, a receive posted
        early would block the send that the peer waits for.
        """
        return self.link_groups[backward, receiver > sender]


def make_context(mesh: Mesh, rank: int, device: Device) -> WorkerContext:
    """Create the process groups (every worker must call this) and this worker's context."""
    data, tensor, pipeline = mesh.coordinates(rank)

    def world(d: int, t: int, p: int) -> int:
        return (d * mesh.tensor + t) * mesh.pipeline + p

    def own(groups: list[tuple[list[int], Any]]) -> Any:
        return next((group for ranks, group in groups if rank in ranks), None)

    def groups(lists: list[list[int]], backend: str | None = None) -> Any:
        """Create a group for each list of ranks, on every worker, and return this worker's."""
        with sched_batch_threads():
            return own([(ranks, dist.new_group(ranks, backend=backend)) for ranks in lists if len(ranks) > 1])

    axes = (range(mesh.data), range(mesh.tensor), range(mesh.pipeline))
    # A script may have initialized NCCL only, but the first P2P exchange goes through the hosts.
    links = BACKENDS[device.kind]
    pipelines = [[world(d, t, p) for p in axes[2]] for d in axes[0] for t in axes[1]]
    return WorkerContext(
        rank=rank,
        mesh=mesh,
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        device=device,
        torch_device=device.torch_device(),
        data_group=groups([[world(d, t, p) for d in axes[0]] for t in axes[1] for p in axes[2]]),
        tensor_group=groups([[world(d, t, p) for t in axes[1]] for d in axes[0] for p in axes[2]]),
        link_groups={(backward, up): groups(pipelines, links) for backward in (False, True) for up in (True, False)},
        pipeline_ranks=next(tuple(ranks) for ranks in pipelines if rank in ranks),
    )
