"""The largest size fits and one more does not, with a memory model that a pencil knows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planner.conftest import MadeSource, layers_to_recompute, plan_of, random_units

from made_profiles import equal_units, profile_of, unit
from stagewright.errors import UsageError
from stagewright.planner.costs.layer_scaling import with_num_layers
from stagewright.planner.costs.measure import ModelCosts, plan_microbatch_sizes
from stagewright.planner.fit import (
    MEMORY,
    SizedModel,
    SizeLimit,
    StrategyFit,
    by_unit_limit,
    fit_strategies,
    memory_of,
    peak_bytes,
)
from stagewright.planner.search.by_unit import memory_by_unit
from stagewright.profiler.profile import Amount
from stagewright.spec.plan import Mesh, OptimizerSpec, Plan

BASE = plan_of(batch=8, optimizer=OptimizerSpec(name="adam"))


def sgd_plan(mesh: Mesh, **fields: int) -> Plan:
    """Return a plan whose optimizer has no states."""
    return plan_of(mesh, optimizer=OptimizerSpec(name="sgd"), **fields)


def batches(source: MadeSource) -> SizedModel:
    def sized(plan: Plan, size: int) -> tuple[Plan, ModelCosts]:
        if plan.mesh.tensor not in source.tensors:
            raise UsageError("no heads to share")
        chosen = replace(plan, batch=size)
        return chosen, source.model(max(plan_microbatch_sizes(chosen)), plan.mesh.tensor)

    return sized


def layers(source: MadeSource) -> SizedModel:
    def sized(plan: Plan, size: int) -> tuple[Plan, ModelCosts]:
        return plan, with_num_layers(source.model(max(plan_microbatch_sizes(plan)), plan.mesh.tensor), size)

    return sized


def rows_of(limit: int, sized: SizedModel, what: str = "batch") -> dict[tuple[str, bool], StrategyFit]:
    found = fit_strategies(BASE, 2, limit, memory_of(sized), what, now=8, microbatches=4)  # type: ignore[arg-type]
    return {(row.strategy, row.recompute): row for row in found}


def largest_by_trying(row: StrategyFit, limit: int, sized: SizedModel) -> int:
    """Every size around the one that was found, one after the other."""
    assert row.plan is not None
    fitting = 0
    for size in range(max(1, row.largest - 5), row.largest + 20):
        try:
            plan, measured = sized(replace(row.plan, batch=BASE.batch, cuts=()), size)
            fitting = size if peak_bytes(plan, measured) <= limit else fitting
        except UsageError:
            continue  # fewer samples than micro-batches
    return fitting


@pytest.mark.parametrize("room", [4_000, 12_345])
def test_the_largest_batch(room: int) -> None:
    source = MadeSource(units=random_units(6, 0), tensors=(1, 2))
    limit = 4 * sum(one.parameter_bytes.total for one in source.units) + room
    sized = batches(source)
    rows = rows_of(limit, sized)
    assert set(rows) == {
        (name, again) for name in ("serial", "data", "data, sharded", "tensor", "pipeline") for again in (False, True)
    }
    for (name, again), row in rows.items():
        assert row.plan is not None, name
        assert row.plan.batch == row.largest
        assert (row.plan.recompute != "none") == again
        assert row.peak_bytes <= limit < row.above_bytes
        assert row.peak_bytes == peak_bytes(*sized(row.plan, row.largest))
        assert row.above_bytes == peak_bytes(*sized(row.plan, row.largest + 1))
        assert row.now_bytes == peak_bytes(*sized(row.plan, 8))
        assert row.largest == largest_by_trying(row, limit, sized)
    assert rows["data", False].largest in (2 * rows["serial", False].largest, 2 * rows["serial", False].largest + 1)
    assert rows["data, sharded", False].largest > rows["data", False].largest
    assert rows["pipeline", True].largest > rows["pipeline", False].largest


def test_a_byte_less_is_a_sample_less() -> None:
    """Serial with Adam: parameters thrice; gradients take less than the activations that go meanwhile."""
    units = [unit(f"u{at}", 1.0, (1.0, 1.0)) for at in range(3)]
    sized = batches(MadeSource(units=tuple(units)))
    serial = replace(BASE, recompute="none")
    needed = {size: peak_bytes(*sized(serial, size)) for size in (6, 7, 8)}
    assert needed[8] - needed[7] == needed[7] - needed[6] == 3 * 1000 + 8, "each unit's activations and the loss's"
    assert needed[7] == 3 * 300 + 7 * (3 * 1000 + 8), "most is held when backward begins"
    assert rows_of(needed[7], sized)["serial", False].largest == 7
    assert rows_of(needed[7] - 1, sized)["serial", False].largest == 6


def test_a_row_says_what_ends_it() -> None:
    """Memory for 7 samples: of models that take 6, 7, 8 and 1 at most."""
    units = [unit(f"u{at}", 1.0, (1.0, 1.0)) for at in range(3)]
    sized = batches(MadeSource(units=tuple(units)))
    limit = peak_bytes(*sized(replace(BASE, recompute="none"), 7))
    found = {}
    for size in (6, 7, 8, 1):
        most = SizeLimit(size=size, reason=f"{size} at most")
        row = fit_strategies(BASE, 1, limit, memory_of(sized), "batch", now=8, microbatches=4, limit=most)[0]
        found[size] = row.largest, row.bound, row.above_bytes > limit
    assert found == {
        6: (6, "6 at most", False),
        7: (7, "7 at most", False),
        8: (7, MEMORY, True),
        1: (1, "1 at most", False),
    }
    endless = fit_strategies(BASE, 1, 2**60, memory_of(sized), "batch", now=8, microbatches=4)[0]
    assert (endless.largest, endless.bound) == (2**20, "no size above 1048576 was tested")
    pipeline = fit_strategies(
        BASE, 2, limit, memory_of(sized), "batch", now=8, microbatches=4, limit=SizeLimit(size=3, reason="3")
    )[-1]
    assert pipeline.refused == "at least 4 are needed, but 3", "as many samples as micro-batches"


def test_the_most_layers() -> None:
    blocks = [replace(one, block=one.name) for one in equal_units(4).units]
    ends = [unit(name, 1.0, (1.0, 1.0)) for name in ("stem", "head")]
    sized = layers(MadeSource(units=(ends[0], *blocks, ends[1])))
    at_seven = peak_bytes(*sized(replace(BASE, recompute="none"), 7))
    rows = rows_of(at_seven, sized, "layers")
    assert rows["serial", False].largest == 7
    assert rows_of(at_seven - 1, sized, "layers")["serial", False].largest == 6
    for row in rows.values():
        if not row.refused:
            assert row.peak_bytes <= at_seven < row.above_bytes
    assert rows["pipeline", False].largest > 7, "two devices hold more"


def test_recomputed_by_blocks() -> None:
    """Whoever holds the whole model keeps what enters each block, and has one block again at a time."""
    blocks = [replace(one, block=one.name) for one in equal_units(4).units]
    ends = [unit(name, 1.0, (1.0, 1.0)) for name in ("stem", "head")]
    sized = layers(MadeSource(units=(ends[0], *blocks, ends[1])))
    plain = replace(BASE, recompute="none")
    rows = rows_of(peak_bytes(*sized(plain, 7)), sized, "layers")
    for strategy in ("serial", "data"):
        again = rows[strategy, True]
        assert again.largest > rows[strategy, False].largest
        assert again.plan is not None
        assert again.plan.cuts == tuple(f"u{at}" for at in range(again.largest - 1))
        assert again.plan.schedule == "interleaved"
        assert again.past is not None
        assert len(again.past.cuts) == again.past_size - 1 > again.largest - 1
        assert again.peak_bytes == peak_bytes(again.plan, sized(plain, again.largest)[1])
    whole = replace(plain, recompute="always")
    assert rows["serial", True].now_bytes < peak_bytes(whole, sized(whole, 8)[1]), "less than as one stage"
    for strategy in ("pipeline", "data, sharded"):
        other = rows[strategy, True].plan
        assert other is not None
        assert (other.cuts, other.schedule) == ((), BASE.schedule), "a pipeline has its own stages, a shard one alone"


def test_memory_is_compared_at_one_size() -> None:
    """A pipeline of two has two layers at least, so that the others are asked for two as well."""
    blocks = [replace(one, block=one.name) for one in equal_units(4).units]
    sized = layers(MadeSource(units=tuple(blocks)))
    rows = fit_strategies(
        BASE, 2, 10**9, memory_of(sized), "layers", now=1, microbatches=4, limit=SizeLimit(size=9, reason="9")
    )
    assert {row.now for row in rows} == {2}
    serial = next(row for row in rows if row.strategy == "serial" and not row.recompute)
    assert serial.now_bytes == peak_bytes(*sized(replace(BASE, recompute="none"), 2))
    alone = fit_strategies(
        BASE, 1, 10**9, memory_of(sized), "layers", now=1, microbatches=4, limit=SizeLimit(size=9, reason="9")
    )
    assert {row.now for row in alone} == {1}


def test_what_can_not_be_used_is_said() -> None:
    sized = batches(MadeSource(units=random_units(6, 0)))
    rows = rows_of(20_000, sized)
    assert rows["tensor", False].refused == "no heads to share"
    assert rows["tensor", False].plan is None
    nothing = rows_of(100, sized)["serial", False]
    assert (nothing.largest, nothing.plan) == (0, None)
    assert nothing.above_bytes == peak_bytes(*sized(replace(BASE, recompute="none"), 1)) > 100
    assert "plan" not in nothing.to_dict()


def test_a_worker_alone_has_one_strategy() -> None:
    sized = batches(MadeSource(units=random_units(6, 0)))
    found = fit_strategies(BASE, 1, 20_000, memory_of(sized), "batch", now=8, microbatches=4)
    assert [(row.strategy, row.recompute) for row in found] == [("serial", False), ("serial", True)]


def test_a_pipeline_s_fullest_worker_counts() -> None:
    """1F1B over two equal stages: the first holds two micro-batches and the batch, the second one and its loss."""
    measured = ModelCosts(profile=profile_of(equal_units(2).units), overheads=MadeSource(units=()).overheads)
    plan = sgd_plan(Mesh(pipeline=2), batch=4, microbatches=4)
    assert peak_bytes(plan, measured) == 100 + 2 * (1000 - 10) + 4 * 10 + 100
    gpipe = replace(plan, schedule="gpipe")
    assert peak_bytes(gpipe, measured) == 100 + 4 * (1000 + 8), "the second stage holds the losses of all"


def test_gradients_rise_above_activations() -> None:
    """Where parameters outweigh what is kept; a tied weight's gradient comes with its first use."""
    small = [replace(one, saved_bytes=Amount(total=10)) for one in equal_units(3).units]
    overheads = MadeSource(units=()).overheads
    plan = sgd_plan(Mesh(), batch=1, microbatches=1)
    free = peak_bytes(plan, ModelCosts(profile=profile_of(tuple(small)), overheads=overheads))
    assert free == 300 + 300, "all gradients, and no activations"
    large = [replace(one, saved_bytes=Amount(total=1000)) for one in small[:2]]
    head = replace(small[2], parameter_bytes=Amount(total=500))
    tied = replace(head, parameter_bytes=Amount(total=500, shares=((0, 100),)))
    held = {
        name: peak_bytes(plan, ModelCosts(profile=profile_of((*large, one)), overheads=overheads))
        for name, one in {"free": head, "tied": tied}.items()
    }
    assert held["free"] == 700 + 2010 + 8 + (500 - 10 - 8), "the head's gradient comes before the rest goes"
    assert held["tied"] == 600 + 2010 + 8 + (400 - 10 - 8), "of the shared part not yet"


def test_stages_of_one_worker_hold_a_tied_weight_once() -> None:
    """Cut into blocks to be recomputed one by one, a worker still has one copy and one gradient of it."""
    units = [replace(one, saved_bytes=Amount(total=10)) for one in equal_units(3).units]
    tied = replace(units[2], parameter_bytes=Amount(total=100, shares=((0, 100),)))
    cuts = tuple(one.name for one in units[:2])
    plan = replace(sgd_plan(Mesh(), batch=1, microbatches=1), cuts=cuts, schedule="interleaved", recompute="always")
    overheads = MadeSource(units=()).overheads
    free, shared = (
        peak_bytes(plan, ModelCosts(profile=profile_of(tuple(made)), overheads=overheads))
        for made in (units, [*units[:2], tied])
    )
    assert free == 3 * 100 + 3 * 100
    assert shared == 2 * 100 + 2 * 100 + 10, "the first stage's gradient is there: its activations come on top"


def test_the_loss_has_gone_backward_before_a_stage_runs_again() -> None:
    measured = ModelCosts(profile=profile_of(equal_units(3).units), overheads=MadeSource(units=()).overheads)
    plan = sgd_plan(Mesh(), batch=1, microbatches=1)
    assert peak_bytes(plan, measured) == 300 + 3 * 1000 + 8
    assert peak_bytes(replace(plan, recompute="always"), measured) == 300 + 3 * 1000, "without what the loss kept"


def test_a_stage_recomputed_has_its_inputs_and_a_tied_gradient_already() -> None:
    """Cut after the first block and the next; the embedding, before the first block, is the head's weight too.

    Memory peaks in the last backward, when the first block's gradient has come and its activations have gone: what the
    head made of the embedding's is there since the first.
    """
    small = [replace(one, saved_bytes=Amount(total=30)) for one in equal_units(4).units]
    embedding = replace(small[0], parameter_bytes=Amount(total=500))
    head = replace(small[3], parameter_bytes=Amount(total=500, shares=((0, 500),)))
    cuts = tuple(one.name for one in small[1:3])
    plan = replace(sgd_plan(Mesh(), batch=1, microbatches=1), cuts=cuts, schedule="interleaved", recompute="always")
    measured = ModelCosts(profile=profile_of((embedding, *small[1:3], head)), overheads=MadeSource(units=()).overheads)
    parameters, gradients = 500 + 2 * 100, 500 + 100
    assert peak_bytes(plan, measured) == parameters + gradients + 2 * 30 + (100 - 30)


@pytest.mark.parametrize("kind", ["batch", "layers"])
def test_as_few_units_as_memory_requires(kind: str) -> None:
    """Recomputed one by one, units allow at least the size of any uniform policy, and no unit more than needed."""
    units = layers_to_recompute(6)
    source = MadeSource(units=tuple(replace(unit, block=unit.name) for unit in units))
    sized, limit = {"batch": batches(source), "layers": layers(source)}[kind], 40_000
    rows = fit_strategies(
        BASE, 2, limit, memory_of(sized), kind, now=8, microbatches=4, by_unit=memory_by_unit(sized, limit)
    )
    by_strategy = {
        name: [row for row in rows if row.strategy == name] for name in ("serial", "data, sharded", "pipeline")
    }
    for name, (none, always, by_unit) in by_strategy.items():
        assert (none.by_unit, always.by_unit, by_unit.by_unit, by_unit.recompute) == (False, False, True, True), name
        assert by_unit.plan is not None
        assert by_unit.plan.recomputed_units == by_unit.recomputed_units
        assert by_unit.recomputed_units
        assert by_unit.peak_bytes <= by_unit_limit(limit) < by_unit.above_bytes
        assert by_unit.peak_bytes == peak_bytes(*sized(by_unit.plan, by_unit.largest))
        assert by_unit.largest >= none.largest
        if name != "serial":  # there, each block is a stage that is recomputed alone too
            assert by_unit.largest > always.largest
        assert none.now_bytes > limit or by_unit.now_bytes == none.now_bytes, "nothing is recomputed where all fits"
