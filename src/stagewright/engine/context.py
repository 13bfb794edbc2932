"""Where a worker stands: its rank, its place in the mesh, its device and the groups it talks in.

world rank = ((d · T) + t) · P + p        data d, tensor t, pipeline p; the pipeline is innermost
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from stagewright.cluster.device import Device
from stagewright.plan.value import Mesh

__all__ = ["WorkerContext", "make_context"]


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
    forward_group: Any
    """This pipeline, for activations; ``None`` for a single stage."""
    backward_group: Any
    """This pipeline, for gradients: a group of its own, so that the two directions never wait for each other."""
    pipeline_ranks: tuple[int, ...]
    """World ranks of this pipeline, in order."""


def make_context(mesh: Mesh, rank: int, device: Device) -> WorkerContext:
    """Make the groups (every worker of the world must call this) and find this worker's place."""
    data, tensor, pipeline = mesh.coordinates(rank)

    def world(d: int, t: int, p: int) -> int:
        return (d * mesh.tensor + t) * mesh.pipeline + p

    def own(groups: list[tuple[list[int], Any]]) -> Any:
        return next((group for ranks, group in groups if rank in ranks), None)

    def groups(lists: list[list[int]]) -> Any:
        """One group for each list of ranks, the same on every worker; this worker's own one."""
        return own([(ranks, dist.new_group(ranks)) for ranks in lists if len(ranks) > 1])

    axes = (range(mesh.data), range(mesh.tensor), range(mesh.pipeline))
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
        forward_group=groups(pipelines),
        backward_group=groups(pipelines),
        pipeline_ranks=next(tuple(ranks) for ranks in pipelines if rank in ranks),
    )
