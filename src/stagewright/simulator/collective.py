"""Time of a collective among n workers: latency α per step and 1/bandwidth β per byte, with the real number of steps.

    algorithm      all-reduce of S bytes               all-gather and reduce-scatter of S bytes
    ring           2(n−1) α + 2 (n−1)/n · S β          (n−1) α + (n−1)/n · S β
    tree           2⌈log₂ n⌉ α + 2 S β                 –
    all-to-all     (n−1) α + (n−1)/n · S β             each worker sends its own S bytes, pair by pair
    hierarchical   reduce-scatter within a host of g, all-reduce of S/g across hosts, all-gather within the host

S is the whole tensor, before scatter or after gather. Every formula grows with S and n. Charging α only once would be
wrong for small tensors and for Gloo. Gloo has only the ring; NCCL has all algorithms and picks the fastest ("best").
If all-reduces between two workers were measured, their times are interpolated instead: no single line fits Gloo at both
small and large sizes.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stagewright.cluster.cluster import FREE, Link
from stagewright.errors import UsageError

Algorithm: TypeAlias = Literal["ring", "tree", "hierarchical", "best"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group and the links between its workers."""

    num_workers: int
    num_on_host: int
    """Workers per host."""
    inside: Link = FREE
    """Link between two workers of one host."""
    outside: Link = FREE
    """Link between two hosts."""
    allreduce_points: tuple[tuple[int, float], ...] = ()
    """Measured all-reduces of two workers: bytes and seconds, both ascending; (): use the formula."""
    algorithm: Algorithm = "ring"

    def __post_init__(self) -> None:
        if self.num_workers < 1 or not 1 <= self.num_on_host <= self.num_workers:
            raise UsageError(f"{self.num_workers} workers with {self.num_on_host} on each host are not a group")

    @property
    def num_hosts(self) -> int:
        return -(-self.num_workers // self.num_on_host)

    @property
    def slowest(self) -> Link:
        """The link that limits a ring through all workers."""
        return self.inside if self.num_hosts == 1 else self.outside


def all_reduce_s(group: Group, num_bytes: float) -> float:
    """Return the time of an all-reduce."""
    if group.num_workers == 1:
        return 0.0
    if group.allreduce_points and group.num_workers == 2:
        return _interpolate(group.allreduce_points, num_bytes)
    algorithms = {"ring": _flat, "tree": _tree, "hierarchical": _hierarchical}
    candidates = algorithms.values() if group.algorithm == "best" else [algorithms[group.algorithm]]
    return min(algorithm(group, num_bytes, passes=2) for algorithm in candidates)


def all_gather_s(group: Group, num_bytes: float) -> float:
    """Return the time of an all-gather of `num_bytes` in total."""
    candidates = {"ring": [_flat], "tree": [_flat], "hierarchical": [_hierarchical], "best": [_flat, _hierarchical]}
    return min(algorithm(group, num_bytes, passes=1) for algorithm in candidates[group.algorithm])


def reduce_scatter_s(group: Group, num_bytes: float) -> float:
    """Return the time of a reduce-scatter of `num_bytes`: an all-gather in reverse."""
    return all_gather_s(group, num_bytes)


def all_to_all_s(group: Group, num_bytes: float) -> float:
    """Return the time of an all-to-all in which each worker sends `num_bytes` in equal parts, one of them to itself."""
    return _flat(group, num_bytes, passes=1)


def ring_bytes(num_workers: int, num_bytes: float, *, passes: int) -> float:
    """Return the bytes each worker sends on a ring: one pass for all-gather or reduce-scatter, two for all-reduce."""
    return passes * (num_workers - 1) / num_workers * num_bytes


def _flat(group: Group, num_bytes: float, *, passes: int) -> float:
    """One ring through all workers."""
    return _ring(group.num_workers, group.slowest, num_bytes, passes=passes)


def _tree(group: Group, num_bytes: float, *, passes: int) -> float:
    link, depth = group.slowest, math.ceil(math.log2(group.num_workers))
    return passes * (depth * link.latency_s + num_bytes / link.bandwidth_bytes_per_s)


def _hierarchical(group: Group, num_bytes: float, *, passes: int) -> float:
    """Rings within hosts, then parallel rings across hosts, one for each part of the tensor."""
    within = _ring(group.num_on_host, group.inside, num_bytes, passes=passes)
    return within + _ring(group.num_hosts, group.outside, num_bytes / group.num_on_host, passes=passes)


def _ring(num_workers: int, link: Link, num_bytes: float, *, passes: int) -> float:
    if num_workers == 1:
        return 0.0
    sent = ring_bytes(num_workers, num_bytes, passes=passes)
    return passes * (num_workers - 1) * link.latency_s + sent / link.bandwidth_bytes_per_s


def _interpolate(points: Sequence[tuple[int, float]], num_bytes: float) -> float:
    """Interpolate linearly; constant below the first point, extrapolated beyond the last."""
    index = bisect.bisect_left(points, (num_bytes, 0.0))
    if index == 0 or len(points) == 1:
        return points[0][1]
    (size, seconds), (larger_size, longer) = points[min(index, len(points) - 1) - 1 :][:2]
    return seconds + (num_bytes - size) * (longer - seconds) / (larger_size - size)
