"""A worker's rank, mesh coordinates, device and process groups: NCCL between GPUs, Gloo between CPUs.

    world rank = ((d · T) + t) · P + p     data d, tensor t, pipeline p; the pipeline is innermost

    one machine                     the loopback interface, whatever other networks it has
    tensor group of CPU workers     shared memory of the host, if all are on one
    several workers on one GPU      each gets its own NCCL host id, and NCCL sends through the loopback
    shares of one GPU               shared memory of the GPU, because NCCL hangs between MPS clients

NCCL refuses two workers on one GPU of one machine. With separate host ids, every plan can be run and checked for parity
on a single GPU; its speed there says nothing about several GPUs.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from stagewright.cluster.device import Device
from stagewright.engine.worker.placement import RankPlacement
from stagewright.engine.worker.watchdog import START_S
from stagewright.machine.gloo_threads import sched_batch_threads
from stagewright.shared_memory.host import memory_id
from stagewright.shared_memory.process_group import GPU_BACKEND, HOST_BACKEND, register
from stagewright.spec.plan import Mesh

BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}
"""Backends by device type: NCCL between GPUs, with Gloo for host tensors."""


def backend_of(device: Device) -> str:
    """Return the backend of a worker's process groups."""
    return register(GPU_BACKEND) if device.share > 1 else BACKENDS[device.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """One worker's world rank, coordinates on the mesh's axes, device and groups."""

    rank: int
    mesh: Mesh
    data: int
    tensor: int
    pipeline: int
    device: Device
    torch_device: torch.device
    data_group: Any
    """Workers with the same stages in other replicas; ``None`` for one replica."""
    tensor_group: Any
    """Workers that share this stage's layers; ``None`` without tensor parallelism."""
    expert_group: Any
    """Replicas among which the experts of this worker's stages are divided; ``None`` without expert parallelism."""
    same_experts_group: Any
    """Replicas that hold the same experts as this worker; ``None`` if there is no other."""
    link_groups: Mapping[tuple[bool, bool], Any]
    """P2P groups of this pipeline, by (for gradients, towards a higher rank)."""
    pipeline_ranks: tuple[int, ...]
    """World ranks from which this worker receives, by pipeline index; its own at its own."""

    @property
    def num_tensor(self) -> int:
        """Workers that share this worker's stages."""
        return self.mesh.degrees[self.pipeline]

    @property
    def uses_nccl(self) -> bool:
        """Whether this worker's tensors are sent by NCCL."""
        return self.torch_device.type == "cuda" and self.device.share == 1

    def link_group(self, sender: int, receiver: int, *, backward: bool) -> Any:
        """Return the group for P2P sends from one worker of this pipeline to another.

        NCCL runs the operations of one pair in one group in order: if both directions shared a group, a receive posted
        early would block the send that the peer waits for.
        """
        return self.link_groups[backward, receiver > sender]


def join_group(device: Device, placement: RankPlacement, devices: Sequence[str], hang_s: float) -> None:
    """Initialize the process group of all workers; ``devices`` are the plan's."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if placement.num_machines == 1 and loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        if device.kind == "cuda" and sum(Device.parse(name).index == device.index for name in devices) > 1:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
            os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}-worker-{placement.rank}")
    if device.kind == "cuda":
        torch.cuda.set_device(device.torch_device())
    # The watchdog ends a hang earlier and explains it; this timeout is for when the watchdog itself is gone.
    options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=2 * max(hang_s, START_S))}
    if placement.store is None:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    with sched_batch_threads():
        dist.init_process_group(backend_of(device), **options)


def make_context(mesh: Mesh, rank: int, device: Device) -> WorkerContext:
    """Create the process groups (every worker must call this) and this worker's context."""
    data, tensor, pipeline = mesh.coordinates(rank)

    memories = gather_memory_ids(device) if max(mesh.degrees) > 1 else []

    def groups(lists: list[list[int]], backend: str | None = None, *, share_memory: bool = False) -> Any:
        """Create a group for each list of ranks, on every worker, and return this worker's."""
        created = []
        for ranks in lists:
            if len(ranks) > 1:
                own = backend_in_memory([memories[member] for member in ranks]) if share_memory else None
                with sched_batch_threads():
                    created.append((ranks, dist.new_group(ranks, backend=own or backend)))
        return next((group for ranks, group in created if rank in ranks), None)

    replicas, stages = range(mesh.data), mesh.positions
    blocks = range(0, mesh.data, mesh.expert)
    divided = [[mesh.rank(d + e, t, p) for e in range(mesh.expert)] for t, p in stages for d in blocks]
    alike = [[mesh.rank(d + e, t, p) for d in blocks] for t, p in stages for e in range(mesh.expert)]
    # A script may have initialized NCCL only, but the first P2P exchange goes through the hosts.
    links = backend_of(device)
    pipelines = mesh.linked_ranks()
    return WorkerContext(
        rank=rank,
        mesh=mesh,
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        device=device,
        torch_device=device.torch_device(),
        data_group=groups([[mesh.rank(d, t, p) for d in replicas] for t, p in stages]),
        tensor_group=groups(
            [[mesh.rank(d, t, p) for t in range(degree)] for d in replicas for p, degree in enumerate(mesh.degrees)],
            share_memory=True,
        ),
        expert_group=groups(divided),
        same_experts_group=groups(alike) if mesh.expert > 1 else None,
        link_groups={(backward, up): groups(pipelines, links) for backward in (False, True) for up in (True, False)},
        pipeline_ranks=mesh.ranks_along("pipeline", rank),
    )


def gather_memory_ids(device: Device) -> list[int]:
    """Return the `memory_id` of every worker, which all call this; 0 where tensors are not in the host's memory."""
    if device.kind != "cpu":
        return [0] * dist.get_world_size()
    own = torch.tensor([memory_id()])
    ids = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ids, own)
    return [int(value) for value in ids]


def backend_in_memory(memory_ids: Sequence[int]) -> str | None:
    """Return the backend of workers that share the host's memory; None if these don't."""
    return register(HOST_BACKEND) if len(set(memory_ids)) == 1 and memory_ids[0] else None
