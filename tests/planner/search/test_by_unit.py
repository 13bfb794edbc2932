"""Recomputed units and cuts that a search solves together: what fits, and faster than any uniform policy."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from tests.planner.conftest import MadeSource, cluster_of, layers_to_recompute, plan_of

from stagewright.cluster.cluster import Link
from stagewright.errors import UsageError
from stagewright.planner.search.by_unit import recompute_units
from stagewright.planner.search.candidates import CandidateBuilder
from stagewright.planner.search.search import search
from stagewright.simulator.costs.overheads import EngineOverheads
from stagewright.spec.activation_checkpointing import can_recompute_units
from stagewright.spec.plan import Mesh, Plan

UNITS = layers_to_recompute(8)
SOURCE = MadeSource(units=UNITS)


def peak(plan: Plan) -> int:
    return SOURCE.prepared(plan, cluster_of(plan.mesh.num_workers)).forecast().peak_memory_bytes


def builder(plan: Plan) -> CandidateBuilder:
    return CandidateBuilder(SOURCE, cluster_of(plan.mesh.num_workers), EngineOverheads(), "pipeline", 1.0)


@pytest.mark.parametrize(("mesh", "schedule"), [("serial", "1f1b"), ("pipeline=2", "1f1b"), ("pipeline=2", "gpipe")])
def test_better_than_every_uniform_policy(mesh: str, schedule: str) -> None:
    """One fitting policy per stage, with every cut, is never faster; the limit lies between none and always."""
    plan = plan_of(batch=8, mesh=Mesh.parse(mesh), microbatches=4, schedule=schedule)
    names = [one.name for one in UNITS]
    uniform = [
        replace(plan, cuts=cuts, recompute=flags)
        for cuts in itertools.combinations(names[:-1], plan.mesh.pipeline - 1)
        for flags in itertools.product((False, True), repeat=plan.mesh.pipeline)
    ]
    peaks = [peak(one) for one in uniform]
    none = next(one for one in uniform if not any(one.recompute) and one.cuts in ((), ("layers.3",)))
    limit = (min(peaks) + 3 * peak(none)) // 4
    forecasts = [
        SOURCE.prepared(replace(one, memory_bytes=limit), cluster_of(plan.mesh.num_workers)).forecast()
        for one in uniform
    ]
    fitting = [forecast.step_s for forecast in forecasts if forecast.fits]
    found = recompute_units(builder(plan), replace(plan, memory_bytes=limit))
    assert found is not None
    assert found.forecast.fits
    assert 0 < len(found.plan.recomputed_units) < len(UNITS)
    assert not fitting or found.forecast.step_s < min(fitting)


def test_no_more_than_memory_requires() -> None:
    plan = plan_of(batch=8, mesh=Mesh(), microbatches=4)
    found = recompute_units(builder(plan), replace(plan, memory_bytes=peak(plan)))
    assert found is not None
    assert found.plan.recompute == "none"
    found = recompute_units(builder(plan), replace(plan, memory_bytes=peak(plan) - 1))
    assert found is not None
    assert len(found.plan.recomputed_units) == 1, "the last unit is kept, so its memory is free in the others' backward"
    assert recompute_units(builder(plan), replace(plan, memory_bytes=500)) is None


def test_offload_where_the_rate_to_the_host_is_known() -> None:
    """Forward hides the copies of two units, so these are offloaded instead of recomputed."""
    plan = plan_of(batch=8, mesh=Mesh(), microbatches=4)
    limit = peak(plan) - 2500
    without = recompute_units(builder(plan), replace(plan, memory_bytes=limit))
    cluster = cluster_of(1)
    cluster = replace(cluster, links=replace(cluster.links, host=Link(bandwidth_bytes_per_s=300, latency_s=0)))
    with_host = CandidateBuilder(SOURCE, cluster, EngineOverheads(), "pipeline", 1.0)
    found = recompute_units(with_host, replace(plan, memory_bytes=limit))
    assert found is not None
    assert without is not None
    assert found.plan.offload != "none"
    assert found.forecast.fits
    assert found.forecast.step_s < without.forecast.step_s
    with pytest.raises(UsageError, match=r"\[links.host\]"):
        SOURCE.prepared(found.plan, cluster_of(1)).forecast()


def test_a_search_proposes_it() -> None:
    base = plan_of(batch=8)
    serial = plan_of(batch=8, mesh=Mesh(), microbatches=8)
    limit = peak(serial) - 1
    options = {"schedules": ("1f1b",), "shards": (False,)}
    found = search(base, SOURCE, cluster_of(1, memory_bytes=limit), **options)
    uniform = search(base, SOURCE, cluster_of(1, memory_bytes=limit), by_unit=False, **options)
    assert found.best[0].plan.recomputed_units
    assert found.best[0].forecast.fits
    assert found.best[0].forecast.step_s < uniform.best[0].forecast.step_s
    with pytest.raises(UsageError, match=r"does not fit|fits"):
        search(base, SOURCE, cluster_of(1, memory_bytes=limit), recomputes=("none",), **options)


def test_plans_that_cannot() -> None:
    plan = plan_of(batch=8, mesh=Mesh(pipeline=2), microbatches=4)
    assert can_recompute_units(plan)
    assert not can_recompute_units(replace(plan, recompute="always"))
    assert not can_recompute_units(replace(plan, schedule="interleaved", stages=4))
    assert not can_recompute_units(replace(plan, training=False))
