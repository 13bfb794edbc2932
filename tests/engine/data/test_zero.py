"""ZeRO's reduce-scatter and all-gather: shards by rows, sums over replicas, bytes and freed gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

NUM_REPLICAS = 3
PADDED = 3 * (4 + 3 + 23_334 + 2)  # elements, with shards padded to the largest
SCALAR = 3  # a scalar is in each replica's part of a reduce-scatter, and in no all-gather
FLAGS = 5 * 8


@pytest.mark.parametrize(
    ("num_microbatches", "every_microbatch", "held"),
    [(1, False, [0]), (1, True, [0]), (2, False, [4, 0]), (2, True, [0, 0])],
)
def test_exchange(
    num_microbatches: int, every_microbatch: bool, held: list[int], pool_of: Callable[[int], Any]
) -> None:
    results = pool_of(NUM_REPLICAS).run("zero_jobs:exchange", num_microbatches, every_microbatch)
    total = num_microbatches * (1 + 2 + 3)
    for result in results:
        assert result["held"] == held, "ZeRO-2 frees full gradients in each micro-batch, ZeRO-1 in the last"
        assert result["gradients"][-1] is None, "no replica used it"
        assert {value for shard in result["gradients"][:-1] for value in shard} == {total}
        assert result["parameters"] == [[1 - total]] * 4 + [[1.0]]
        num_scatters = num_microbatches if every_microbatch else 1
        assert result["bytes"] == 4 * (num_scatters * (PADDED + SCALAR) + PADDED) + FLAGS
    assert [result["shapes"] for result in results] == [
        [(2, 2), (1, 3), (), (23_334,), (2,)],
        [(2, 2), (0, 3), (), (23_334,), (2,)],
        [(1, 2), (0, 3), (), (23_332,), (0,)],
    ]
