"""The parts of a speed-up add up for every schedule, and the change that is named is the best of those offered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.planner.conftest import SLOW, MadeSource, cluster_of, plan_of, random_units

from made_profiles import equal_units, unit
from made_runs import SERIAL_S, make_run
from stagewright.cluster.cluster import FREE, Cluster, DeviceGroup, Link, Links
from stagewright.errors import UsageError
from stagewright.forecast.predict import step_seconds
from stagewright.forecast.terms import EngineTerms, ModelTerms
from stagewright.forecast.what_if import PARTS
from stagewright.plan.schedules import SCHEDULES
from stagewright.plan.value import Mesh, Plan
from stagewright.planner.explain import _changes, best_change, explain_plan, explain_run
from stagewright.planner.forecasting import Prepared

ENGINE = EngineTerms(action_s=0.01, step_s=0.1, message_s=0.02, collective_share=0.3, crowding=0.1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mesh", [Mesh(pipeline=4), Mesh(data=2, pipeline=2), Mesh(tensor=2, pipeline=2)], ids=str)
def test_parts_add_up(schedule: str, mesh: Mesh) -> None:
    source = MadeSource(units=random_units(8, 1), tensors=(1, 2))
    plan = plan_of(mesh, batch=16, microbatches=8, schedule=schedule)
    prepared = source.prepared(plan, cluster_of(4), terms=ENGINE)
    found = explain_plan(prepared)
    parts = found.parts
    assert not found.is_measured
    assert parts.step_s == pytest.approx(prepared.forecast().step_s)
    assert parts.ideal_s == pytest.approx(parts.serial_s / 4)
    assert parts.ideal_s + sum(one.seconds for one in parts.parts) == pytest.approx(parts.step_s)
    lost = parts.lost_speedup()
    assert [name for name, _ in lost] == [one.name for one in parts.parts]
    assert 4 - sum(speed for _, speed in lost) == pytest.approx(parts.speedup)
    named = {one.name: one.seconds for one in parts.parts}
    assert set(named) <= set(PARTS)
    assert all(seconds >= -1e-9 for seconds in named.values()), "nothing is gained by what is lost"
    assert (named["collectives"] > 0) == (mesh.data * mesh.tensor > 1)
    assert named["transfer"] > 0
    assert named["recomputation"] == pytest.approx(0)
    data = found.to_dict()
    assert sum(one["lost_speedup"] for one in data["parts"]) == pytest.approx(4 - data["speedup"])


def test_sums_between_hosts_are_no_transfer() -> None:
    """A plan without stages has no messages, whatever lies between its hosts."""
    cluster = Cluster(
        devices=(DeviceGroup(kind="cpu", count=1, hosts=2),),
        links=Links(inter_host=Link(bandwidth_bytes_per_s=100.0, latency_s=0.5)),
    )
    source = MadeSource(units=random_units(4, 0))
    for shard in (False, True):
        prepared = source.prepared(plan_of(Mesh(data=2), shard=shard), cluster, terms=ENGINE)
        named = {one.name: one.seconds for one in explain_plan(prepared).parts.parts}
        assert named["transfer"] == pytest.approx(0)
        assert named["collectives"] > 0.5
    # Nor do stages inside each host, with replicas between the hosts, wait for anything but their messages.
    inside = Cluster(devices=(DeviceGroup(kind="cpu", count=2, hosts=2),), links=cluster.links)
    both = source.prepared(plan_of(Mesh(data=2, pipeline=2), microbatches=4), inside, terms=ENGINE)
    quiet = replace(ENGINE, message_s=0.0)
    free = source.prepared(plan_of(Mesh(data=2, pipeline=2), microbatches=4), inside, terms=quiet)
    assert {one.name: one.seconds for one in explain_plan(free).parts.parts}["transfer"] == pytest.approx(0)
    assert {one.name: one.seconds for one in explain_plan(both).parts.parts}["transfer"] > 0


def test_a_part_alone() -> None:
    """Recomputation alone, of equal stages with free links and a split that is even."""
    source = MadeSource(units=equal_units(4).units)
    plain = source.prepared(plan_of(Mesh(pipeline=4), microbatches=8), cluster_of(4, FREE))
    again = plain.changed(plan=replace(plain.plan, recompute="always"))
    named = {one.name: one.seconds for one in explain_plan(again).parts.parts}
    assert named["recomputation"] == pytest.approx(step_seconds(again.costs) - step_seconds(plain.costs))
    assert named["transfer"] == named["collectives"] == pytest.approx(0)


def offered(prepared: Prepared) -> dict[str, float]:
    """Each change that is offered and fits, with its step; those that are refused are left out."""
    found = {}
    for what, plan in _changes(prepared):
        try:
            forecast = prepared.changed(plan=plan).forecast()
        except UsageError:
            continue
        if forecast.fits:
            found[what] = forecast.step_s
    return found


PLANS: dict[str, Plan] = {
    "a bad cut": plan_of(Mesh(pipeline=2), batch=16, microbatches=4, cuts=("u1",)),
    "few micro-batches": plan_of(Mesh(pipeline=2), batch=16, microbatches=2, schedule="gpipe"),
    "recomputed": plan_of(Mesh(pipeline=2), batch=16, microbatches=8, recompute="always"),
    "interleaved": plan_of(Mesh(pipeline=2), batch=16, microbatches=8, schedule="interleaved"),
    "replicas": plan_of(Mesh(data=2, pipeline=2), batch=16, microbatches=4),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("link", [FREE, SLOW], ids=["free", "slow"])
def test_the_change_gains_most(name: str, link: Link) -> None:
    source = MadeSource(units=random_units(8, 6))
    prepared = source.prepared(PLANS[name], cluster_of(4, link), terms=ENGINE)
    now, found = step_seconds(prepared.costs), best_change(prepared)
    every = offered(prepared)
    assert every
    assert found is not None
    assert found.step_s == pytest.approx(min(every.values()))
    assert every[found.what] == pytest.approx(found.step_s)
    assert found.gain == pytest.approx(now / found.step_s - 1)
    assert found.gain >= 0.01


def test_a_change_that_must_be_found() -> None:
    """Six units after one cut and two before: of all changes that only move a cut, the one towards the middle gains."""
    source = MadeSource(units=equal_units(8).units)
    prepared = source.prepared(PLANS["a bad cut"], cluster_of(2, FREE))
    every = offered(prepared)
    assert every["cut after u2 instead of u1"] < step_seconds(prepared.costs) < every["cut after u0 instead of u1"]
    # Replicas with free links reach n, and nothing reaches more.
    found = best_change(prepared)
    assert found is not None
    assert found.what == "data=2 instead of pipeline=2"
    assert found.step_s == pytest.approx(prepared.costs.serial_s / 2, rel=0.05)


def test_what_does_not_fit_is_not_named() -> None:
    source = MadeSource(units=equal_units(8).units)
    prepared = source.prepared(PLANS["recomputed"], cluster_of(2, FREE))
    free = best_change(prepared)
    assert free is not None
    peak = prepared.forecast().peak_memory_bytes
    tight = prepared.changed(cluster=cluster_of(2, FREE, memory_bytes=peak))
    found = best_change(tight)
    assert (
        found is None or prepared.changed(plan=dict(_changes(tight))[found.what]).forecast().peak_memory_bytes <= peak
    )
    assert found != free


def test_nothing_gains() -> None:
    source = MadeSource(units=equal_units(2).units)
    prepared = source.prepared(plan_of(Mesh(data=2)), cluster_of(2, FREE))
    assert best_change(prepared) is None
    assert explain_plan(prepared).to_dict()["change"] is None


def test_a_codec_goes_with_its_links() -> None:
    """Replicas have no links to compress: they are offered to a plan with a codec too."""
    plan = replace(PLANS["few micro-batches"], codec="bf16")
    prepared = MadeSource(units=random_units(8, 6)).prepared(plan, cluster_of(2))
    assert "data=2 instead of pipeline=2" in offered(prepared)


def of_the_run(plan: Plan) -> Prepared:
    """A run's plan over units that a profile took to be a hundred times as long as they were."""
    units = [replace(unit(name, 0.1, (0.05, 0.05)), name=name) for name in ("layers.0", "head")]
    return MadeSource(units=tuple(units), terms=ModelTerms()).prepared(replace(plan, devices=()), cluster_of(2, FREE))


@pytest.mark.parametrize("recompute", ["none", "always"])
def test_a_run_is_explained_by_its_own_events(recompute: str, tmp_path: Path) -> None:
    make_run(tmp_path, "serial", number=0, step_s=SERIAL_S)
    run = make_run(tmp_path, "pipeline=2", number=1, schedule="gpipe", step_s=0.2, recompute=recompute)
    found = explain_run(of_the_run(run.plan()), run)
    parts = found.parts
    assert found.is_measured
    assert (parts.step_s, parts.serial_s) == (0.2, SERIAL_S)
    assert parts.ideal_s + sum(one.seconds for one in parts.parts) == pytest.approx(0.2)
    named = {one.name: one.seconds for one in parts.parts}
    # Two stages of F = 10 ms and B = 20 ms, forward again within B; two micro-batches fill and drain once.
    again = 0.010 if recompute == "always" else 0.0
    assert named["bubble"] == pytest.approx(0.030 - again)
    assert named["recomputation"] == pytest.approx(3 * again)
    assert named["imbalance"] == pytest.approx(0)
    assert named["unexplained"] == pytest.approx(0.2 - 3 * 0.030)


def test_a_run_without_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path, "pipeline=2", schedule="gpipe")
    prepared = of_the_run(run.plan())
    run.finish("failed", {"error": "gone"})
    with pytest.raises(UsageError, match="has no measured steps: explain a run that"):
        explain_run(prepared, run)
