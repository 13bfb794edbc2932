"""Devices of different speeds: how a batch is shared among replicas, and how fast each pipeline stage's device is.

    speeds = [1.0, 1.0, 0.5, 0.5], data=2, pipeline=2, batch = 12

    workers 0 and 1    replica 0    speed 2    8 samples
    workers 2 and 3    replica 1    speed 1    4 samples

A replica is as fast as its workers together, because its stages are cut by their speeds; workers that divide a layer
wait for the slowest of them, and n of them count as n times as fast as one. Replicas share one list of cuts, so a stage
counts with its slowest device, relative to the replica that it belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

from stagewright.errors import UsageError
from stagewright.spec.plan import Mesh, Plan

Speeds: TypeAlias = tuple[float, ...] | Literal["measured"]
MEASURED: Literal["measured"] = "measured"
ALIKE = 0.05
"""Devices whose measured speeds differ by less count as equally fast: two measurements of one device may differ so."""


def given_speeds(plan: Plan) -> tuple[float, ...]:
    """Return the relative speed of each worker; (): all alike, or not measured yet."""
    return () if isinstance(plan.speeds, str) else plan.speeds


def relative_speeds(speeds: Sequence[float]) -> tuple[float, ...]:
    """Return measured speeds relative to the fastest; (): they differ too little to matter."""
    fastest = max(speeds)
    return tuple(round(speed / fastest, 3) for speed in speeds) if min(speeds) < (1 - ALIKE) * fastest else ()


def replica_sizes(plan: Plan, num_samples: int) -> tuple[int, ...]:
    """Return how many samples of a batch each replica gets: as many for each, or in proportion to its speed."""
    speeds = given_speeds(plan)
    if speeds:
        return proportional_sizes(num_samples, replica_speeds(plan.mesh, speeds))
    return split_sizes(num_samples, plan.mesh.data)


def split_sizes(num_samples: int, num_parts: int) -> tuple[int, ...]:
    """Return the number of samples in each part; with fewer samples than parts, the last parts are empty."""
    if num_samples < 1 or num_parts < 1:
        raise UsageError(
            f"can't split a batch of {num_samples} samples over {num_parts} replicas; both must be at least 1"
        )
    small, num_larger = divmod(num_samples, num_parts)
    return (small + 1,) * num_larger + (small,) * (num_parts - num_larger)


def proportional_sizes(num_samples: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide samples in proportion to weights; what is left over goes to the largest remainders, the first of equals.

    With equal weights, sizes are those of ``torch.tensor_split``. Every part gets a sample if there are enough.
    """
    total = math.fsum(weights)
    exact = [num_samples * weight / total for weight in weights]
    sizes = [math.floor(share + 1e-9) for share in exact]
    remainders = [round(share - size, 9) for share, size in zip(exact, sizes, strict=True)]
    by_remainder = sorted(range(len(weights)), key=lambda part: (-remainders[part], part))
    for part in by_remainder[: num_samples - sum(sizes)]:
        sizes[part] += 1
    while 0 in sizes and num_samples >= len(sizes):
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(0)] += 1
    return tuple(sizes)


def replica_speeds(mesh: Mesh, speeds: Sequence[float]) -> tuple[float, ...]:
    """Return the speed of each replica: the sum over its stages."""
    return tuple(
        math.fsum(_stage_speed(mesh, speeds, replica, index) for index in range(mesh.pipeline))
        for replica in range(mesh.data)
    )


def pipeline_speeds(plan: Plan) -> tuple[float, ...]:
    """Return the speed at each pipeline index, 1 for the fastest; (): all alike."""
    mesh, speeds = plan.mesh, given_speeds(plan)
    if not speeds and mesh.tensor_degrees:
        speeds = (1.0,) * mesh.num_workers
    if not speeds:
        return ()
    totals = replica_speeds(mesh, speeds)
    slowest = [
        min(_stage_speed(mesh, speeds, replica, index) / totals[replica] for replica in range(mesh.data))
        for index in range(mesh.pipeline)
    ]
    return tuple(speed / max(slowest) for speed in slowest)


def first_speeds(speeds: Speeds, num_workers: int) -> Speeds:
    """Return the speeds of the first workers; (): they are alike."""
    if isinstance(speeds, str):
        return speeds if num_workers > 1 else ()
    return speeds[:num_workers] if len(set(speeds[:num_workers])) > 1 else ()


def _stage_speed(mesh: Mesh, speeds: Sequence[float], replica: int, index: int) -> float:
    """Return the speed of a replica's workers at a pipeline index: of the slowest, times their share of the most."""
    degree = mesh.degrees[index]
    ranks = (mesh.rank(data=replica, tensor=tensor, pipeline=index) for tensor in range(degree))
    return min(speeds[rank] for rank in ranks) * (degree / mesh.size("tensor"))
