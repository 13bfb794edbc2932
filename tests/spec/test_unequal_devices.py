"""Devices of different speeds: shares of a batch, speeds of stages, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from stagewright.engine.jobs.elastic import next_plan
from stagewright.errors import UsageError
from stagewright.simulator.bubble_bound import bubble_bound
from stagewright.spec.plan import Plan
from stagewright.spec.plan_file import plan_from_table, plan_to_table
from stagewright.spec.plan_rules import check_plan
from stagewright.spec.unequal_devices import (
    first_speeds,
    pipeline_speeds,
    proportional_sizes,
    relative_speeds,
    replica_sizes,
)

weights = st.lists(st.floats(0.01, 10), min_size=1, max_size=12)


@given(st.integers(1, 500), weights)
def test_sizes_are_proportional(num_samples: int, speeds: list[float]) -> None:
    sizes = proportional_sizes(num_samples, speeds)
    assert sum(sizes) == num_samples
    if num_samples >= len(speeds):
        assert min(sizes) >= 1
    exact = [num_samples * speed / sum(speeds) for speed in speeds]
    if min(exact) >= 1:
        assert all(abs(size - share) < 1 + 1e-6 for size, share in zip(sizes, exact, strict=True))


@given(st.integers(1, 500), st.integers(1, 12), st.floats(0.01, 10))
def test_equal_speeds_are_equal_shares(num_samples: int, num: int, speed: float) -> None:
    small, larger = divmod(num_samples, num)
    assert proportional_sizes(num_samples, [speed] * num) == (small + 1,) * larger + (small,) * (num - larger)


def test_shares_and_stages() -> None:
    plan = Plan.of("m", 12, "data=2,pipeline=2", speeds=(1.0, 1.0, 0.5, 0.5))
    assert replica_sizes(plan, 12) == (8, 4)
    assert pipeline_speeds(plan) == (1.0, 1.0)
    plan = Plan.of("m", 12, "pipeline=2", speeds=(0.5, 1.0))
    assert (replica_sizes(plan, 12), pipeline_speeds(plan)) == ((12,), (0.5, 1.0))
    # The workers that divide a layer wait for the slowest of them.
    plan = Plan.of("m", 12, "data=2,tensor=2", speeds=(1.0, 0.5, 1.0, 1.0))
    assert replica_sizes(plan, 12) == (4, 8)
    assert replica_sizes(Plan.of("m", 12, "data=2", speeds="measured"), 12) == (6, 6), "until they are measured"
    assert pipeline_speeds(Plan.of("m", 12, "pipeline=2")) == ()


def test_small_differences_do_not_count() -> None:
    assert relative_speeds([2.0, 1.92]) == ()
    assert relative_speeds([1.0, 2.0]) == (0.5, 1.0)
    assert first_speeds((1.0, 1.0, 0.5), 2) == ()
    assert first_speeds((1.0, 0.5, 0.5), 2) == (1.0, 0.5)
    assert (first_speeds("measured", 1), first_speeds("measured", 2)) == ((), "measured")


def test_the_bound_counts_speeds() -> None:
    assert bubble_bound(Plan.of("m", 12, "data=2", speeds=(1.0, 0.5))) == pytest.approx(1.5)
    assert bubble_bound(Plan.of("m", 12, "data=2", speeds=(0.5, 1.0))) == pytest.approx(3.0)


@pytest.mark.parametrize("speeds", [(1.0, 0.5), "measured", ()])
def test_plan_files(speeds: tuple[float, ...] | str) -> None:
    plan = Plan.of("m", 12, "data=2", speeds=speeds)
    assert plan_from_table(plan_to_table(plan), "plan.toml") == plan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speeds": (1.0,)}, "speeds has 1 for the 2 workers of data=2: give 2"),
        ({"speeds": (1.0, 0.0)}, "a speed of 0 is not possible"),
        ({"speeds": (1.0, 0.01), "microbatches": 4}, "the slowest replica gets 1 of 12 samples"),
    ],
)
def test_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_plan(Plan.of("m", 12, "data=2", **options))


def test_a_lost_replica_takes_its_speeds_along() -> None:
    plan = Plan.of("m", 12, "data=3", speeds=(1.0, 0.5, 0.25), devices=("cpu:0", "cpu:1", "cpu:2"))
    smaller = next_plan(plan, 1, stays_away=True)
    assert (smaller.speeds, smaller.devices) == ((1.0, 0.25), ("cpu:0", "cpu:2"))
