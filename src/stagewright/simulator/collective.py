"""What a collective takes among n workers: latency α a step, 1/bandwidth β a byte, with the real number of steps.

    algorithm      all-reduce of S bytes               all-gather and reduce-scatter of S bytes
    ring           2(n−1) α + 2 (n−1)/n · S β          (n−1) α + (n−1)/n · S β
    tree           2⌈log₂ n⌉ α + 2 S β                 –
    hierarchical   reduce-scatter within a host of g, all-reduce of S/g across hosts, all-gather within the host

S is the whole tensor, before it is scattered or after it is gathered. Every formula rises with S and with n. Charging α
once would be wrong for small messages and for Gloo. Gloo has the ring alone; NCCL has all of them and chooses: "best",
the least. Where all-reduces of two were measured, these are taken as they were, straight between the sizes: no line
goes through both a few and many bytes of Gloo's.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stagewright.cluster.cluster import FREE, Link
from stagewright.errors import UsageError

__all__ = ["Algorithm", "Group", "all_gather_s", "all_reduce_s", "reduce_scatter_s", "ring_bytes"]

Algorithm: TypeAlias = Literal["ring", "tree", "hierarchical", "best"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Workers that take part in a collective, and what is between them."""

    num_workers: int
    """Workers in all."""
    num_on_host: int
    """Of them on each host; all of them where there is one host."""
    inside: Link = FREE
    """Between two workers of one host."""
    outside: Link = FREE
    """Between two hosts."""
    sums: tuple[tuple[int, float], ...] = ()
    """All-reduces of two as measured: bytes and seconds, both rising; (): by formula."""
    algorithm: Algorithm = "ring"
    """How the workers' library goes about it."""

    def __post_init__(self) -> None:
        if self.num_workers < 1 or not 1 <= self.num_on_host <= self.num_workers:
            raise UsageError(f"{self.num_workers} workers with {self.num_on_host} on each host are no group")

    @property
    def num_hosts(self) -> int:
        """Hosts that take part."""
        return -(-self.num_workers // self.num_on_host)

    @property
    def slowest(self) -> Link:
        """The link that paces a ring through all workers."""
        return self.inside if self.num_hosts == 1 else self.outside


def all_reduce_s(group: Group, num_bytes: float) -> float:
    """Time of a sum that every worker gets."""
    if group.num_workers == 1:
        return 0.0
    if group.sums and group.num_workers == 2:
        return _between(group.sums, num_bytes)
    ways = {"ring": _flat, "tree": _tree, "hierarchical": _hierarchical}
    chosen = ways.values() if group.algorithm == "best" else [ways[group.algorithm]]
    return min(way(group, num_bytes, passes=2) for way in chosen)


def all_gather_s(group: Group, num_bytes: float) -> float:
    """Time until every worker has all parts, `num_bytes` together."""
    ways = {"ring": [_flat], "tree": [_flat], "hierarchical": [_hierarchical], "best": [_flat, _hierarchical]}
    return min(way(group, num_bytes, passes=1) for way in ways[group.algorithm])


def reduce_scatter_s(group: Group, num_bytes: float) -> float:
    """Time until every worker has the sum of its part of `num_bytes`: an all-gather, backwards."""
    return all_gather_s(group, num_bytes)


def ring_bytes(num_workers: int, num_bytes: float, *, passes: int) -> float:
    """Bytes that leave each worker on a ring: once around for a gather or scatter, twice for an all-reduce."""
    return passes * (num_workers - 1) / num_workers * num_bytes


def _flat(group: Group, num_bytes: float, *, passes: int) -> float:
    """One ring through all workers."""
    return _ring(group.num_workers, group.slowest, num_bytes, passes=passes)


def _tree(group: Group, num_bytes: float, *, passes: int) -> float:
    link, depth = group.slowest, math.ceil(math.log2(group.num_workers))
    return passes * (depth * link.latency_s + num_bytes / link.bandwidth_bytes_per_s)


def _hierarchical(group: Group, num_bytes: float, *, passes: int) -> float:
    """Rings within hosts and, side by side, rings of those that have the same part on each host."""
    within = _ring(group.num_on_host, group.inside, num_bytes, passes=passes)
    return within + _ring(group.num_hosts, group.outside, num_bytes / group.num_on_host, passes=passes)


def _ring(num_workers: int, link: Link, num_bytes: float, *, passes: int) -> float:
    if num_workers == 1:
        return 0.0
    moved = ring_bytes(num_workers, num_bytes, passes=passes)
    return passes * (num_workers - 1) * link.latency_s + moved / link.bandwidth_bytes_per_s


def _between(points: Sequence[tuple[int, float]], num_bytes: float) -> float:
    """The value at a size, straight between two points; before the first as there, past the last as before it."""
    at = bisect.bisect_left(points, (num_bytes, 0.0))
    if at == 0 or len(points) == 1:
        return points[0][1]
    (size, taken), (larger, longer) = points[min(at, len(points) - 1) - 1 :][:2]
    return taken + (num_bytes - size) * (longer - taken) / (larger - size)
