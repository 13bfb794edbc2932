"""Process groups of a profile: their ranks, mesh axes, and which one Gloo's events belong to.

NCCL's events name their group. Gloo's do not, and the peer of a message is its rank in the group:

    rank 2 of data=2,pipeline=2       mesh_dp = [0, 2]     gloo:all_reduce        → mesh_dp
                                      mesh_pp = [2, 3]     gloo:send to 1         → mesh_pp, whose rank 1 is rank 3
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group."""

    described: str = ""
    """What DeviceMesh, Megatron or the user calls it."""
    ranks: tuple[int, ...] = ()

    def axis(self, collective: str) -> str:
        """Return the mesh axis that the description names, as DeviceMesh and Megatron write it; else empty."""
        words = set(re.split(r"[^a-z]+", self.described.lower()))
        axes = (
            ("tensor", {"tp", "tensor"}),
            ("pipeline", {"pp", "pipeline"}),
            ("context", {"cp", "context"}),
            ("expert", {"ep", "expert"}),
            ("data", {"dp", "ddp", "fsdp", "hsdp", "data", "shard", "replicate"}),
        )
        named = next((axis for axis, known in axes if words & known), "")
        return named or ("expert" if collective == "all-to-all" else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of a rank by name."""

    by_name: Mapping[str, Group]
    messages: Group
    """Of Gloo's sends and receives: the only one of a pipeline; without ranks if there is none."""
    collectives: Group
    """Of Gloo's collectives: the only one that is neither a pipeline nor all ranks; without ranks if there is none."""

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> Groups:
        """Read them from the profile's ``distributedInfo``."""
        listed = job.get("pg_config")
        by_name = {
            str(group.get("pg_name", "")): Group(
                described=str(group.get("pg_desc") or ""), ranks=listed_ranks(group.get("ranks"))
            )
            for group in (listed if isinstance(listed, list) else [])
            if isinstance(group, dict)
        }
        size = job.get("world_size")
        own = [group for group in by_name.values() if len(group.ranks) > 1]
        pipelines = [group for group in own if group.axis("") == "pipeline"]
        others = [group for group in own if group.axis("") != "pipeline" and len(group.ranks) != size]
        return cls(
            by_name=by_name,
            messages=pipelines[0] if len(pipelines) == 1 else Group(),
            collectives=others[0] if len(others) == 1 else Group(),
        )

    def global_peer(self, peer: int) -> int:
        """Return the world rank of a peer that Gloo recorded."""
        ranks = self.messages.ranks
        return ranks[peer] if peer < len(ranks) else peer


def listed_ranks(value: object) -> tuple[int, ...]:
    """Return a list of ranks, also from its text; empty where it is shortened or wrong."""
    if isinstance(value, str):
        value = [int(word) for word in re.findall(r"\d{1,7}", value)] if re.fullmatch(r"\[[\d,\s]*\]", value) else None
    if not isinstance(value, list | tuple) or not all(isinstance(rank, int) and rank >= 0 for rank in value):
        return ()
    return tuple(value)
