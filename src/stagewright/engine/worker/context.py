"""Where a worker stands: its rank, its place in the mesh, its device and the groups it talks in.

world rank = ((d · T) + t) · P + p        data d, tensor t, pipeline p; the pipeline is innermost
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from stagewright.cluster.device import Device
from stagewright.machine.gloo_threads import patient_threads
from stagewright.spec.plan import Mesh

__all__ = ["BACKENDS", "WorkerContext", "make_context"]

BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}
"""What workers on such devices talk through: NCCL between GPUs, with Gloo for what stays on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """One worker's place in a run."""

    rank: int
    """World rank."""
    mesh: Mesh
    """Sizes of the three axes."""
    data: int
    """Place on the data axis."""
    tensor: int
    """Place on the tensor axis."""
    pipeline: int
    """Place on the pipeline axis."""
    device: Device
    """What this worker computes on."""
    torch_device: torch.device
    """Where its tensors live."""
    data_group: Any
    """Workers that hold the same stages of other replicas; ``None`` for one replica."""
    tensor_group: Any
    """Workers that share this stage's layers; ``None`` for one."""
    link_groups: Mapping[tuple[bool, bool], Any]
    """This pipeline's links, by whether they are for gradients and whether they lead to a higher rank."""
    pipeline_ranks: tuple[int, ...]
    """World ranks of this pipeline, in order."""

    def link_group(self, sender: int, receiver: int, *, backward: bool) -> Any:
        """The group for messages from one worker of this pipeline to another.

        NCCL does the operations of one pair in one group one after the other: where messages of both ways shared it, a
        receive that is posted ahead would hold up the send that the peer waits for.
        """
        return self.link_groups[backward, receiver > sender]


def make_context(mesh: Mesh, rank: int, device: Device) -> WorkerContext:
    """Make the groups (every worker of the world must call this) and find this worker's place."""
    data, tensor, pipeline = mesh.coordinates(rank)

    def world(d: int, t: int, p: int) -> int:
        return (d * mesh.tensor + t) * mesh.pipeline + p

    def own(groups: list[tuple[list[int], Any]]) -> Any:
        return next((group for ranks, group in groups if rank in ranks), None)

    def groups(lists: list[list[int]], backend: str | None = None) -> Any:
        """One group for each list of ranks, the same on every worker; this worker's own one."""
        with patient_threads():
            return own([(ranks, dist.new_group(ranks, backend=backend)) for ranks in lists if len(ranks) > 1])

    axes = (range(mesh.data), range(mesh.tensor), range(mesh.pipeline))
    # A script may have joined its GPUs with NCCL alone; what they meet first goes through the hosts.
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
