"""The data axis, replicated and sharded, against serial on the whole batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

STRATEGIES = pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])


def check(found: dict[str, Any]) -> None:
    assert found["loss"] <= 1e-5
    assert found["gradients"] <= 1e-5
    assert found["state"] <= 1e-5
    assert found["loads"]
    assert found["tied"]


@STRATEGIES
@pytest.mark.parametrize("workers", [2, 3])
def test_equals_serial_for_any_batch(shard: bool, workers: int, pool_of: Callable[[int], Any]) -> None:
    """Whole and partial batches, one of them with fewer samples than replicas; tied weights, an unused layer, an output
    that the loss does not use, a parameter that is a single number."""
    for found in pool_of(workers).run("data_jobs:steps", "tied", (8, 7, 5, 1), shard):
        check(found)
        assert found["none"] == [["unused.weight", "unused.bias", "aside.weight", "aside.bias"]] * 4


@STRATEGIES
@pytest.mark.parametrize("forwards_first", [False, True], ids=["1f1b", "gpipe"])
def test_accumulates_chunks(shard: bool, forwards_first: bool, pool_of: Callable[[int], Any]) -> None:
    for found in pool_of(2).run("data_jobs:steps", "tied", (8, 8, 8), shard, chunks=2, forwards_first=forwards_first):
        check(found)


def test_counts_the_bytes_of_buckets(pool_of: Callable[[int], Any]) -> None:
    # Tied embedding 11×6, three layers of 6×6 + 6, one number: 193 gradients; a mark for each of the 12 parameters.
    for found in pool_of(2).run("data_jobs:steps", "tied", (8, 8), False):
        assert found["bytes"] == [193 * 4 + 12 * 8] * 2


def test_counts_the_bytes_of_shards(pool_of: Callable[[int], Any]) -> None:
    # Units: 3 × (6×6 + 6), gathered twice and scattered once. The root: 12×6 (11 rows, padded to 2 shards), the unused
    # 6×5 + 6 (5 rows padded) and 2×6 + 2, gathered once and scattered once; the single number and the marks by hand.
    for found in pool_of(2).run("data_jobs:steps", "tied", (8, 8), True):
        assert found["bytes"] == [3 * 4 * 3 * 42 + 2 * 4 * (72 + 36 + 14) + 4 + 12 * 8] * 2


@STRATEGIES
@pytest.mark.parametrize("workers", [2, 3])
def test_batch_norm_is_averaged_by_weight(shard: bool, workers: int, pool_of: Callable[[int], Any]) -> None:
    for found in pool_of(workers).run("data_jobs:steps", "normed", (8, 7, 5, 2), shard):
        check(found)


def test_running_mean_is_that_of_the_whole_batch(pool_of: Callable[[int], Any]) -> None:
    assert max(pool_of(3).run("data_jobs:running_mean", 7)) <= 1e-6


@STRATEGIES
@pytest.mark.parametrize("chunks", [1, 2])
def test_replicas_that_use_different_parameters(shard: bool, chunks: int, pool_of: Callable[[int], Any]) -> None:
    """In the first step each replica uses all, then each its own, then all the same, then again each its own."""
    for found in pool_of(2).run("data_jobs:steps", "routed", (8, 7, 5, 6), shard, chunks=chunks):
        check(found)
        assert found["none"] == [[], [], ["routed.ways.0.weight", "routed.ways.0.bias"], []]


@STRATEGIES
@pytest.mark.parametrize("name", ["picking", "passing", "ending"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_replicas_whose_backward_goes_through_different_units(
    name: str, chunks: int, shard: bool, pool_of: Callable[[int], Any]
) -> None:
    """One that backward reaches on one replica alone is gathered and summed by both, at the same moment."""
    for found in pool_of(2).run("data_jobs:steps", name, (8, 7, 5, 6), shard, chunks=chunks, time_limit_s=30):
        check(found)


def test_shards_that_run_again_gather_alike(pool_of: Callable[[int], Any]) -> None:
    assert max(pool_of(2).run("data_jobs:recomputed", time_limit_s=30)) <= 1e-5


@STRATEGIES
def test_torch_warns_of_nothing(shard: bool, pool_of: Callable[[int], Any]) -> None:
    assert pool_of(2).run("data_jobs:warned", shard) == [[], []]


def test_outputs_may_be_changed_in_place(pool_of: Callable[[int], Any]) -> None:
    assert max(pool_of(2).run("data_jobs:changed_in_place")) <= 1e-5


@STRATEGIES
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_tensor_and_data_on_one_mesh(name: str, shard: bool, pool_of: Callable[[int], Any]) -> None:
    for found in pool_of(4).run("data_jobs:mesh_step", name, shard):
        assert found["loss"] <= 1e-5
        assert found["gradients"] <= 1e-5
        assert found["state"] <= 1e-4  # Adam divides small differences by small numbers
        assert found["tensor_bytes"] > 0
        assert found["data_bytes"] > 0


def test_a_calibration_travels_as_json(pool_of: Callable[[int], Any]) -> None:
    """Nothing that comes from the network is unpickled: keys arrive as texts."""
    wanted = [[{"sums": {"8": [0.5] * length}}] for length in (1, 4)]
    assert pool_of(2).run("data_jobs:rounds") == [wanted, wanted]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH")
def test_threads_of_groups_take_no_core_from_the_one_that_computes(pool_of: Callable[[int], Any]) -> None:
    for found in pool_of(2).run("data_jobs:gloo_policies"):
        assert set(found["made"]) == {os.SCHED_BATCH}
        assert found["own"] == [os.SCHED_OTHER]
