"""Collectives: volumes, latencies and the adapters that a group brings."""

from __future__ import annotations

import pytest

from stagewright.analytic.hardware.collectives import Network
from stagewright.analytic.hardware.named_cluster import named_cluster, network_of

NETWORK = Network(
    devices_per_host=8, intra_bytes_per_s=300e9, intra_latency_s=0.0, inter_bytes_per_s=25e9, inter_latency_s=0.0,
    intra_share=1.0, inter_share=1.0, overhead_s=0.0,
)  # fmt: skip


def test_volumes() -> None:
    group = NETWORK.group(8, 1)
    assert NETWORK.collective_s("all_reduce", group, 8e9) == pytest.approx(2 * 7e9 / 300e9)
    assert NETWORK.collective_s("all_gather", group, 8e9) == pytest.approx(7e9 / 300e9)
    assert NETWORK.collective_s("all_reduce", NETWORK.group(1, 1), 8e9) == 0.0
    # Two hosts: one member of each host brings one adapter, eight bring eight.
    assert NETWORK.collective_s("all_gather", NETWORK.group(2, 8), 2e9) == pytest.approx(1e9 / 25e9)
    assert NETWORK.collective_s("all_gather", NETWORK.group(16, 1), 16e9) == pytest.approx(15e9 / 200e9)
    assert NETWORK.message_s(25e9, 8) == pytest.approx(1.0)
    assert NETWORK.message_s(300e9, 1) == pytest.approx(1.0)


def test_small_tensors_cost_latency_and_buckets_repeat_it() -> None:
    slow = Network(
        devices_per_host=8, intra_bytes_per_s=300e9, intra_latency_s=1e-6, inter_bytes_per_s=25e9,
        inter_latency_s=1e-5, overhead_s=0.0,
    )  # fmt: skip
    group = slow.group(64, 8)
    ring = slow.collective_s("reduce_scatter", group, 8)
    tree = slow.collective_s("all_reduce", group, 8)
    low_latency = 2.7 / 9.6  # of NCCL's LL protocol over its simple one
    assert ring == pytest.approx(63e-5 * low_latency, rel=0.01)
    assert tree == pytest.approx(2 * 6e-5 * low_latency, rel=0.01), "logarithm of the hosts"
    assert slow.bucketed_s("reduce_scatter", group, 100e6, 25e6) == pytest.approx(
        slow.collective_s("reduce_scatter", group, 100e6) + 3 * 63e-5, rel=0.01
    )


def test_protocols_by_size() -> None:
    """Rates between two sizes are those of LL, LL128 and simple; a larger tensor never takes less time."""
    network = Network(
        devices_per_host=8, intra_bytes_per_s=300e9, intra_latency_s=3.4e-6, inter_bytes_per_s=25e9,
        inter_latency_s=9.6e-6, intra_share=1.0, inter_share=1.0, overhead_s=8.4e-6,
    )  # fmt: skip
    group = network.group(8, 1)

    def rate(size: float) -> float:
        slower, faster = (network.collective_s("all_gather", group, num) for num in (size * 1.01, size))
        return 7 / 8 * size * 0.01 / (slower - faster)

    assert network.collective_s("all_gather", group, 8) == pytest.approx(3.6e-6 + 7 * 0.47e-6, rel=0.01)
    assert rate(64 << 10) == pytest.approx(75e9, rel=0.01)
    assert rate(2 << 20) == pytest.approx(276e9, rel=0.01)
    assert rate(64 << 20) == pytest.approx(300e9, rel=0.01)
    for kind in ("all_gather", "all_reduce", "all_to_all"):
        for members in (group, network.group(16, 1), network.group(64, 8)):
            times = [network.collective_s(kind, members, 2**power) for power in range(8, 34)]
            assert times == sorted(times)


def test_switches_that_add() -> None:
    """8 H100 reach a bus bandwidth of 480 GB/s where a ring reaches 360 (NVIDIA/nccl-tests issue 212)."""
    network = network_of(named_cluster("8xh100"))
    num_bytes = 8e9
    found = {
        size: 2 * (size - 1) / size * num_bytes / network.collective_s("all_reduce", network.group(size, 1), num_bytes)
        for size in (4, 8)
    }
    assert found[8] == pytest.approx(480e9, rel=0.02)
    assert found[4] == pytest.approx(360e9, rel=0.02), "no faster than a ring"
    ring = network_of(named_cluster("8xa100"))
    assert ring.nvls_share == 0.0
    assert network_of(named_cluster("8xh100 pcie")).nvls_share == 0.0


def test_trees_for_small_all_reduces_and_rings_for_large_ones() -> None:
    network = network_of(named_cluster("64x8xa100"))
    group = network.group(64, 8)
    small = network.collective_s("all_reduce", group, 1024)
    assert small < 2 * 63 * network.inter_latency_s, "a tree"
    large, half = (network.collective_s("all_reduce", group, size) for size in (8e9, 4e9))
    rate = network.inter_bytes_per_s * network.inter_share
    assert (large - half) == pytest.approx(2 * 63 / 64 * 4e9 / rate), "a ring"
