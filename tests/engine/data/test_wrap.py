"""DDP and FSDP replicas match the single-device baseline on the whole batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

STRATEGIES = pytest.mark.parametrize("shard", [False, True], ids=["ddp", "fsdp"])


def check(result: dict[str, Any]) -> None:
    assert result["loss"] <= 1e-5
    assert result["gradients"] <= 1e-5
    assert result["state"] <= 1e-5
    assert result["loads"]
    assert result["tied"]


@STRATEGIES
@pytest.mark.parametrize("workers", [2, 3])
def test_parity_for_any_batch_size(shard: bool, workers: int, pool_of: Callable[[int], Any]) -> None:
    """Full and partial batches, one with fewer samples than replicas; tied weights, an unused layer, an output that the
    loss ignores, a scalar parameter."""
    for result in pool_of(workers).run("data_jobs:steps", "tied", (8, 7, 5, 1), shard):
        check(result)
        assert result["none"] == [["unused.weight", "unused.bias", "aside.weight", "aside.bias"]] * 4


@STRATEGIES
@pytest.mark.parametrize("forwards_first", [False, True], ids=["1f1b", "gpipe"])
def test_gradient_accumulation(shard: bool, forwards_first: bool, pool_of: Callable[[int], Any]) -> None:
    for result in pool_of(2).run("data_jobs:steps", "tied", (8, 8, 8), shard, chunks=2, forwards_first=forwards_first):
        check(result)


def test_ddp_traffic(pool_of: Callable[[int], Any]) -> None:
    # Tied embedding 11×6, three layers of 6×6 + 6, one scalar: 193 gradients; a flag for each of the 12 parameters.
    for result in pool_of(2).run("data_jobs:steps", "tied", (8, 8), False):
        assert result["bytes"] == [193 * 4 + 12 * 8] * 2


def test_fsdp_traffic(pool_of: Callable[[int], Any]) -> None:
    # Units: 3 × (6×6 + 6), all-gathered twice, reduce-scattered once. The root: 12×6 (11 rows, padded to 2 shards), the
    # unused 6×5 + 6 (5 rows padded) and 2×6 + 2, gathered and scattered once; the scalar and the flags all-reduced.
    for result in pool_of(2).run("data_jobs:steps", "tied", (8, 8), True):
        assert result["bytes"] == [3 * 4 * 3 * 42 + 2 * 4 * (72 + 36 + 14) + 4 + 12 * 8] * 2


@STRATEGIES
@pytest.mark.parametrize("workers", [2, 3])
def test_batch_norm_statistics_are_averaged_by_weight(shard: bool, workers: int, pool_of: Callable[[int], Any]) -> None:
    for result in pool_of(workers).run("data_jobs:steps", "normed", (8, 7, 5, 2), shard):
        check(result)


def test_running_mean_matches_the_whole_batch(pool_of: Callable[[int], Any]) -> None:
    assert max(pool_of(3).run("data_jobs:running_mean", 7)) <= 1e-6


@STRATEGIES
@pytest.mark.parametrize("chunks", [1, 2])
def test_replicas_that_use_different_parameters(shard: bool, chunks: int, pool_of: Callable[[int], Any]) -> None:
    """Each replica uses all parameters in step 1, different ones in steps 2 and 4, the same ones in step 3."""
    for result in pool_of(2).run("data_jobs:steps", "routed", (8, 7, 5, 6), shard, chunks=chunks):
        check(result)
        assert result["none"] == [[], [], ["routed.ways.0.weight", "routed.ways.0.bias"], []]


@STRATEGIES
@pytest.mark.parametrize("name", ["picking", "passing", "ending"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_replicas_whose_backward_goes_through_different_units(
    name: str, chunks: int, shard: bool, pool_of: Callable[[int], Any]
) -> None:
    """A unit that backward reaches on one replica only is gathered and reduced by both, at the same point."""
    for result in pool_of(2).run("data_jobs:steps", name, (8, 7, 5, 6), shard, chunks=chunks, time_limit_s=30):
        check(result)


def test_fsdp_with_activation_checkpointing(pool_of: Callable[[int], Any]) -> None:
    assert max(pool_of(2).run("data_jobs:recomputed", time_limit_s=30)) <= 1e-5


@STRATEGIES
def test_no_torch_warnings(shard: bool, pool_of: Callable[[int], Any]) -> None:
    assert pool_of(2).run("data_jobs:warned", shard) == [[], []]


def test_outputs_can_be_changed_in_place(pool_of: Callable[[int], Any]) -> None:
    assert max(pool_of(2).run("data_jobs:changed_in_place")) <= 1e-5


@STRATEGIES
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_tensor_and_data_on_one_mesh(name: str, shard: bool, pool_of: Callable[[int], Any]) -> None:
    for result in pool_of(4).run("data_jobs:mesh_step", name, shard):
        assert result["loss"] <= 1e-5
        assert result["gradients"] <= 1e-5
        assert result["state"] <= 1e-4  # Adam amplifies rounding of small gradients
        assert result["tensor_bytes"] > 0
        assert result["data_bytes"] > 0


def test_calibration_is_exchanged_as_json(pool_of: Callable[[int], Any]) -> None:
    """Nothing from the network is unpickled: keys arrive as strings."""
    expected = [[{"sums": {"8": [0.5] * length}}] for length in (1, 4)]
    assert pool_of(2).run("data_jobs:rounds") == [expected, expected]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH")
def test_gloo_threads_run_under_sched_batch(pool_of: Callable[[int], Any]) -> None:
    for result in pool_of(2).run("data_jobs:gloo_policies"):
        assert set(result["made"]) == {os.SCHED_BATCH}
        assert result["own"] == [os.SCHED_OTHER]
