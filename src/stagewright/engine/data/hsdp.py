"""Process groups of HSDP: replicas shard parameters within groups of neighbors, and replicate them across groups.

    data=4, fsdp_shards=2       shard groups       0 1 │ 2 3      all-gather, reduce-scatter
                                replicate groups   0 2 │ 1 3      all-reduce of the reduce-scattered gradients

Neighbors along data have neighboring ranks, so a shard group is on one host if the host has room for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from stagewright.machine.gloo_threads import sched_batch_threads
from stagewright.spec.plan import Mesh


@dataclass(frozen=True, slots=True)
class ShardGroups:
    """The two groups of one worker."""

    shard: Any
    """Replicas among which the parameters are divided."""
    replicate: Any
    """Replicas that hold the same shard; None if there is no other."""


def make_shard_groups(mesh: Mesh, rank: int, num_shards: int) -> ShardGroups:
    """Create the groups of all workers, and return this worker's; every worker must call this."""
    stages = [(tensor, pipeline) for tensor in range(mesh.size("tensor")) for pipeline in range(mesh.pipeline)]
    firsts, offsets = range(0, mesh.data, num_shards), range(num_shards)

    def create(lists: list[list[int]]) -> Any:
        with sched_batch_threads():
            created = [(ranks, dist.new_group(ranks)) for ranks in lists]
        return next(group for ranks, group in created if rank in ranks)

    return ShardGroups(
        create([[mesh.rank(first + offset, *stage) for offset in offsets] for stage in stages for first in firsts]),
        create([[mesh.rank(first + offset, *stage) for first in firsts] for stage in stages for offset in offsets]),
    )
