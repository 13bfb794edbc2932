"""Micro-batches of different lengths, weighted by tokens, equal plain torch on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest

SCHEDULES = ["gpipe", "1f1b", "interleaved", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev"]


def assert_equal(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert max(error for pair in result["errors"] for error in pair) < 1e-5
        assert result["worst"] < 1e-5


def test_a_pipeline(pool_of: Any) -> None:
    assert_equal(pool_of(2).run("length_jobs:training", "pipeline=2", "1f1b"))


@pytest.mark.parametrize("options", [{}, pytest.param({"recompute": "always"}, marks=pytest.mark.long)])
def test_packed_sequences_in_a_pipeline(pool_of: Any, options: dict[str, Any]) -> None:
    """A packed sequence crosses the cut; each micro-batch has sequences of other lengths."""
    assert_equal(pool_of(2).run("length_jobs:training", "pipeline=2", model="Tagger", **options))


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_hundred_random_sets_of_lengths(pool_of: Any, schedule: str) -> None:
    """29 steps, and as many evaluations, under each of the seven schedules."""
    first = 29 * SCHEDULES.index(schedule)
    seeds = range(first, first + 29)
    assert_equal(pool_of(2).run("length_jobs:training", "pipeline=2", schedule, seeds, time_limit_s=1200))


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("data=2", {"shard": True}),
        pytest.param("serial", {}, marks=pytest.mark.long),
        pytest.param("data=2", {}, marks=pytest.mark.long),
        pytest.param("pipeline=2", {"recompute": "always"}, marks=pytest.mark.long),
    ],
)
def test_other_strategies(pool_of: Any, mesh: str, options: dict[str, Any]) -> None:
    workers = 1 if mesh == "serial" else 2
    assert_equal(pool_of(workers).run("length_jobs:training", mesh, **options))
