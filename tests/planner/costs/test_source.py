"""Between two measurements lies a straight line, for everything that grows with the samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planner.conftest import MadeSource, equal_amounts, plan_of, random_units

from stagewright.errors import UsageError
from stagewright.planner.costs.interpolation import interpolate, interpolate_at
from stagewright.planner.costs.measure import ModelCosts
from stagewright.planner.costs.source import MeasuredCostSource, source_for_plan
from stagewright.profiler.profile import Amount
from stagewright.spec.plan import Plan

MADE = MadeSource(units=random_units(5, 0), tensors=(1, 2))


@pytest.mark.parametrize("size", [1, 2, 5, 8, 40])
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_line_is_met(size: int, tensor: int) -> None:
    found, real = interpolate(MADE.model(2, tensor), MADE.model(8, tensor), size), MADE.model(size, tensor)
    assert found.profile.batch_size == size
    assert equal_amounts(found.profile.units) == equal_amounts(real.profile.units)
    for made, wanted in zip(found.profile.units, real.profile.units, strict=True):
        for name in ("forward", "backward_input", "backward_weight"):
            assert getattr(made, name).median_s == pytest.approx(getattr(wanted, name).median_s)
    assert found.profile.whole_forward.median_s == pytest.approx(real.profile.whole_forward.median_s)
    assert found.profile.whole_backward.median_s == pytest.approx(real.profile.whole_backward.median_s)
    assert found.overheads.loss_forward_s == pytest.approx(real.overheads.loss_forward_s)
    assert found.overheads.loss_kept_bytes == real.overheads.loss_kept_bytes
    assert found.overheads.optimizer_s_per_byte == pytest.approx(real.overheads.optimizer_s_per_byte)
    assert found.tensor == real.tensor
    assert found.num_tensor == tensor
    assert (found.whole is None) == (tensor == 1)
    if found.whole is not None and real.whole is not None:
        assert equal_amounts(found.whole.units) == equal_amounts(real.whole.units)


@pytest.mark.parametrize(
    ("size", "around"), [(1, (2, 8)), (2, None), (5, (2, 8)), (8, None), (9, (8, 64)), (100, (8, 64))]
)
def test_of_several_the_two_nearest_count(size: int, around: tuple[int, int] | None) -> None:
    """As on a GPU: no slower with 8 samples than with 2, eight times as slow with 64."""
    models = [MADE.model(2, 1), replace(MADE.model(2, 1)), MADE.model(64, 1)]
    models[1] = replace(models[1], profile=replace(models[1].profile, batch_size=8))
    by_size = {2: models[0], 8: models[1], 64: models[2]}
    wanted = by_size[size] if around is None else interpolate(by_size[around[0]], by_size[around[1]], size)
    assert interpolate_at([models[2], models[0], models[1]], size) == wanted
    assert interpolate_at(models[:1], size) is models[0]


def test_what_does_not_grow_stays() -> None:
    """A constant part, such as a mask of a fixed size, is in both measurements and in the line."""

    def with_constant(measured: ModelCosts) -> ModelCosts:
        units = [
            replace(one, saved_bytes=Amount(total=one.saved_bytes.total + 77, shares=((0, 70),) if at else ()))
            for at, one in enumerate(measured.profile.units)
        ]
        return replace(measured, profile=replace(measured.profile, units=tuple(units)))

    found = interpolate(with_constant(MADE.model(2, 1)), with_constant(MADE.model(8, 1)), 32).profile.units
    assert equal_amounts(found) == equal_amounts(with_constant(MADE.model(32, 1)).profile.units)


def test_nothing_falls_below_nothing() -> None:
    """Noise: the larger batch was quicker; far beyond, the line would be below 0."""
    small, large = MADE.model(8, 1), replace(MADE.model(2, 1))
    large = replace(large, profile=replace(large.profile, batch_size=16))
    found = interpolate(small, large, 200)
    assert all(one.forward.median_s == 1e-9 for one in found.profile.units)
    assert all(one.crossing_bytes == 0 for one in found.profile.units)


def test_it_is_measured_once() -> None:
    asked = []

    def measure(plan: Plan, size: int) -> ModelCosts:
        asked.append((size, plan.mesh.tensor))
        if plan.mesh.tensor not in MADE.tensors:
            raise UsageError(f"no {plan.mesh.tensor}")
        assert plan.mesh.num_workers == plan.mesh.tensor
        return MADE.model(size, plan.mesh.tensor)

    source = MeasuredCostSource(plan=plan_of(), small=2, large=8, max_measure_s=10_000, measure=measure)
    assert source.num_units == 5
    assert source.tensor_sizes(3) == [1, 2]
    for size in (2, 4, 8, 4, 100):
        assert source.model(size, 2).profile.batch_size == size
    assert asked == [(2, 1), (2, 2), (2, 3), (8, 2)]
    fresh = MeasuredCostSource(plan=plan_of(), small=2, large=8, measure=lambda plan, size: MADE.model(size, 1))
    assert [fresh.model(size, 1).profile.source for size in (8, 2, 8, 4)] == ["measured"] * 3 + ["line"]
    assert source.measure_size(4, 2)
    assert asked[-1] == (4, 2)
    assert source.model(4, 2) == MADE.model(4, 2)
    assert not source.measure_size(4, 2), "it is known by now"
    assert not source.measure_size(2, 2)
    assert not source.measure_size(1000, 2), "that would take long"
    assert asked[-1] == (4, 2)
    lone = MeasuredCostSource(plan=plan_of(), small=2, large=2, measure=measure)
    assert lone.model(64, 1).profile.batch_size == 2, "one size was measured: shares of it are counted instead"


@pytest.mark.parametrize(
    ("batch", "chunks", "ends"),
    [(32, 8, (4, 8)), (32, 1, (16, 32)), (6, 1, (3, 6)), (2, 2, (1, 2)), (2, 1, (2, 2)), (1, 1, (1, 1))],
)
def test_sizes_around_a_plan(batch: int, chunks: int, ends: tuple[int, int]) -> None:
    plan = plan_of(batch=batch, microbatches=chunks)
    own = MADE.model(batch // chunks, 1)
    found = source_for_plan(plan, own, lambda plan, size: MADE.model(size, 1))
    assert (found.small, found.large) == ends
    assert found.model(batch // chunks, 1) is own


def test_a_size_that_can_not_be_run_stays_on_the_line() -> None:
    asked = []

    def measure(plan: Plan, size: int) -> ModelCosts:
        asked.append(size)
        if size == 1:
            raise ValueError("Expected more than 1 value per channel when training")
        return MADE.model(size, 1)

    source = MeasuredCostSource(plan=plan_of(), small=2, large=8, max_measure_s=10_000, measure=measure)
    assert not source.measure_size(1, 1)
    assert not source.measure_size(1, 1)
    assert asked.count(1) == 1
    assert source.model(1, 1).profile.source == "line"


def test_a_line_is_through_the_nearest() -> None:
    """From 8 samples on, each takes twice as long."""

    def measure(plan: Plan, size: int) -> ModelCosts:
        found = MADE.model(max(size, 2 * size - 8), 1)
        return replace(found, profile=replace(found.profile, batch_size=size))

    source = MeasuredCostSource(plan=plan_of(), small=2, large=8, max_measure_s=10_000, measure=measure)
    once = MADE.units[0].forward.median_s

    def seconds(size: int) -> float:
        return source.model(size, 1).profile.units[0].forward.median_s / once

    assert [seconds(size) for size in (1, 4, 12, 16)] == pytest.approx([1, 4, 12, 16])
    assert source.measure_size(16, 1)
    assert [seconds(size) for size in (1, 4, 12, 16, 20)] == pytest.approx([1, 4, 16, 24, 32])
