"""Collectives cost what their steps and bytes cost."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, strategies as st

from stagewright.cluster.cluster import Cluster, DeviceGroup, Link, Links
from stagewright.errors import UsageError
from stagewright.simulator.collective import Group, all_gather_s, all_reduce_s, reduce_scatter_s
from stagewright.simulator.topology import Topology
from stagewright.spec.plan import Mesh

SLOW = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-4)
FAST = Link(bandwidth_bytes_per_s=1e11, latency_s=1e-6)


def group(num_workers: int, num_on_host: int | None = None, algorithm: str = "ring") -> Group:
    on_host = num_on_host or num_workers
    return Group(num_workers=num_workers, num_on_host=on_host, inside=FAST, outside=SLOW, algorithm=algorithm)  # type: ignore[arg-type]


def test_ring() -> None:
    link = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-3)
    four = Group(num_workers=4, num_on_host=4, inside=link)
    assert all_reduce_s(four, 1e9) == pytest.approx(6e-3 + 1.5)
    assert all_gather_s(four, 1e9) == reduce_scatter_s(four, 1e9) == pytest.approx(3e-3 + 0.75)


def test_tree_and_hierarchy() -> None:
    assert all_reduce_s(group(8, 8, "tree"), 8e9) == pytest.approx(2 * 3 * 1e-6 + 2 * 8e9 / 1e11)
    within = 2 * 7 * 1e-6 + 2 * 7 / 8 * 1e9 / 1e11
    across = 2 * 3 * 1e-4 + 2 * 3 / 4 * 1e9 / 8 / 1e9
    assert all_reduce_s(group(32, 8, "hierarchical"), 1e9) == pytest.approx(within + across)
    assert all_reduce_s(group(32, 8, "best"), 1e9) == pytest.approx(within + across)
    assert all_gather_s(group(32, 8, "best"), 1e9) == pytest.approx((within + across) / 2)
    assert all_reduce_s(group(8, 8, "best"), 8.0) == all_reduce_s(group(8, 8, "tree"), 8.0), "few bytes"
    assert all_gather_s(group(8, 8, "best"), 1e9) == all_gather_s(group(8), 1e9)


def test_gpus_sum_the_quickest_way_and_cpus_in_a_ring() -> None:
    """NCCL knows which of its workers share a host; Gloo's ring is paced by the slowest link."""

    def data_group(kind: Literal["cpu", "cuda"]) -> Group:
        devices = (DeviceGroup(kind=kind, count=4, hosts=2),)
        cluster = Cluster(devices=devices, links=Links(intra_host=FAST, inter_host=SLOW))
        return Topology(mesh=Mesh(data=8), cluster=cluster).group("data")

    ring = 2 * 7 * 1e-4 + 2 * 7 / 8 * 1e9 / 1e9
    assert all_reduce_s(data_group("cpu"), 1e9) == pytest.approx(ring)
    within, across = 2 * 3 * 1e-6 + 2 * 3 / 4 * 1e9 / 1e11, 2 * 1e-4 + 1e9 / 4 / 1e9
    assert all_reduce_s(data_group("cuda"), 1e9) == pytest.approx(within + across)
    assert reduce_scatter_s(data_group("cuda"), 1e9) == pytest.approx((within + across) / 2)


@given(n=st.integers(1, 64), small=st.floats(0, 1e9), more=st.floats(0, 1e9))
def test_monotone(n: int, small: float, more: float) -> None:
    for algorithm in ("ring", "tree", "hierarchical", "best"):
        same = group(n, n, algorithm)
        assert all_reduce_s(same, small) <= all_reduce_s(same, small + more)
    assert all_reduce_s(group(1), small) == 0.0
    assert all_reduce_s(group(n), small) <= all_reduce_s(group(n + 1), small)


def test_sums_as_they_were_measured() -> None:
    """Straight between the points; only of as many workers as were measured."""
    points = ((8, 1e-4), (1000, 3e-4), (3000, 4e-4))
    pair = Group(num_workers=2, num_on_host=2, inside=SLOW, allreduce_points=points)
    sizes = (0, 8, 504, 1000, 2000, 3000, 5000)
    assert [all_reduce_s(pair, size) for size in sizes] == pytest.approx([1e-4, 1e-4, 2e-4, 3e-4, 3.5e-4, 4e-4, 5e-4])
    three = Group(num_workers=3, num_on_host=3, inside=SLOW, allreduce_points=points)
    assert all_reduce_s(three, 1000) == all_reduce_s(Group(num_workers=3, num_on_host=3, inside=SLOW), 1000)


def test_no_group() -> None:
    with pytest.raises(UsageError, match="not a group"):
        Group(num_workers=2, num_on_host=3)
