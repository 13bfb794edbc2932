"""The parts of a speed-up add up for every schedule, and the change that is named is the best of those offered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.planner.conftest import SLOW, FixedSource, MadeSource, cluster_of, plan_of, random_units

from made_profiles import equal_units, unit
from made_runs import SERIAL_S, make_run
from stagewright.cluster.cluster import FREE, Cluster, DeviceGroup, Link, Links
from stagewright.errors import UsageError
from stagewright.planner.costs.measure import ModelCosts
from stagewright.planner.costs.source import source_for_plan
from stagewright.planner.explain import Change, _changes, _stage_as_measured, explain_plan, explain_run, rank_changes
from stagewright.planner.forecast import PreparedPlan, prepare_plan
from stagewright.planner.search.search import search
from stagewright.schedules.rules import SCHEDULES
from stagewright.simulator.costs.overheads import EngineOverheads, ModelOverheads
from stagewright.simulator.simulate import step_seconds
from stagewright.simulator.what_if import LOSSES
from stagewright.spec.plan import Mesh, Plan
from stagewright.trace.breakdown import breakdown, mean_parts
from stagewright.trace.read import read_trace

ENGINE = EngineOverheads(action_s=0.01, step_s=0.1, message_s=0.02, collective_share=0.3, contention=0.1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mesh", [Mesh(pipeline=4), Mesh(data=2, pipeline=2), Mesh(tensor=2, pipeline=2)], ids=str)
def test_parts_add_up(schedule: str, mesh: Mesh) -> None:
    source = MadeSource(units=random_units(8, 1), tensors=(1, 2))
    plan = plan_of(mesh, batch=16, microbatches=8, schedule=schedule)
    prepared = source.prepared(plan, cluster_of(4), overheads=ENGINE)
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
    assert set(named) <= set(LOSSES)
    own = 2 * ENGINE.action_s + ENGINE.step_s  # of one device's step, which is in the ideal
    assert all(seconds >= -own / 4 - 1e-9 for seconds in named.values()), "nothing is gained by what is lost"
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
        prepared = source.prepared(plan_of(Mesh(data=2), shard=shard), cluster, overheads=ENGINE)
        named = {one.name: one.seconds for one in explain_plan(prepared).parts.parts}
        assert named["transfer"] == pytest.approx(0)
        assert named["collectives"] > 0.5
    # Nor do stages inside each host, with replicas between the hosts, wait for anything but their messages.
    inside = Cluster(devices=(DeviceGroup(kind="cpu", count=2, hosts=2),), links=cluster.links)
    both = source.prepared(plan_of(Mesh(data=2, pipeline=2), microbatches=4), inside, overheads=ENGINE)
    quiet = replace(ENGINE, message_s=0.0)
    free = source.prepared(plan_of(Mesh(data=2, pipeline=2), microbatches=4), inside, overheads=quiet)
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


def best_change(prepared: PreparedPlan) -> Change | None:
    return explain_plan(prepared).change


def offered(prepared: PreparedPlan) -> dict[str, float]:
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
    prepared = source.prepared(PLANS[name], cluster_of(4, link), overheads=ENGINE)
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


def test_what_other_sizes_take() -> None:
    """Pieces of 4 samples take as long as 10 do elsewhere: replicas with 16 each gain more than their share tells."""
    source = FixedSource(units=equal_units(8).units)
    plan = plan_of(Mesh(pipeline=2), batch=32, microbatches=8)
    prepared = source.prepared(plan, cluster_of(2, FREE))
    tried = {one.what: one.step_s for one in rank_changes(prepared)}
    for what, other in dict(_changes(prepared)).items():
        if what in tried:
            assert tried[what] == pytest.approx(source.prepared(other, cluster_of(2, FREE)).forecast().step_s), what
    now = prepared.forecast().step_s
    assert tried["data=2 instead of pipeline=2"] == pytest.approx((16 + 6) * 24 + 16 * 0.2 + 0.8)
    assert now / tried["4 micro-batches instead of 8"] > 1.15
    found = best_change(prepared)
    assert found is not None
    assert found.what == "data=2 instead of pipeline=2"
    assert found.gain > 1.0


def test_the_best_change_is_measured() -> None:
    """By the line through 4 and 8 samples, replicas of 16 would be the best; measured, these take as long as 48."""
    fixed = FixedSource(units=equal_units(8, 1e-3, (1e-3, 1e-3)).units, overheads=ModelOverheads())
    asked = []

    def measure(plan: Plan, size: int) -> ModelCosts:
        asked.append((size, plan.mesh.tensor))
        found = fixed.model(48 if size == 16 else size, 1)
        return replace(found, profile=replace(found.profile, batch_size=size))

    plan, own = plan_of(Mesh(pipeline=2), batch=32, microbatches=8), fixed.model(4, 1)
    prepared = prepare_plan(plan, own, cluster_of(2, FREE), source=source_for_plan(plan, own, measure))
    found = explain_plan(prepared)
    assert found.change is not None
    assert found.change.what == "4 micro-batches instead of 8"
    assert sorted(asked) == [(8, 1), (16, 1), (32, 1)], "the line's other end, the best change, serial; each once"


def test_serial_is_the_quickest_way_on_one_device() -> None:
    """As in a search, and as a serial run beside a run: not the same micro-batches one after the other."""
    source = FixedSource(units=equal_units(8).units)
    plan = plan_of(Mesh(pipeline=2), batch=32, microbatches=8)
    prepared = source.prepared(plan, cluster_of(2, FREE))
    parts = explain_plan(prepared).parts
    assert parts.serial_s == pytest.approx((32 + 6) * 24 + 32 * 0.2 + 0.8)
    named = {one.name: one.seconds for one in parts.parts}
    in_pieces = prepared.costs.serial_s
    assert named["micro-batching overhead"] == pytest.approx((in_pieces - parts.serial_s) / 2)
    searched = search(plan_of(batch=32), source, cluster_of(2, FREE), top=1000, schedules=("1f1b",)).best
    same = next(one for one in searched if (one.plan.mesh, one.plan.microbatches) == (plan.mesh, 8))
    assert parts.speedup == pytest.approx(same.forecast.speedup)


@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(tensor=2), Mesh(data=2, tensor=2)], ids=str)
def test_changes_are_tried_without_stages_too(mesh: Mesh) -> None:
    source = FixedSource(units=random_units(8, 6), tensors=(1, 2))
    prepared = source.prepared(plan_of(mesh, batch=32, microbatches=4), cluster_of(4, SLOW))
    found = explain_plan(prepared)
    assert found.num_tried >= 2
    assert found.to_dict()["num_tried"] == found.num_tried
    tried = {one.what for one in rank_changes(prepared)}
    assert {"2 micro-batches instead of 4", "8 micro-batches instead of 4"} <= tried
    count = mesh.num_workers
    assert (f"data={count} instead of {mesh}" in tried) == (mesh.tensor > 1)
    assert (f"pipeline=2 in 16 micro-batches instead of {mesh}" in tried) == (count == 2)
    assert found.change is not None
    assert "instead of" in found.change.what


def test_none_is_tried_where_there_is_none() -> None:
    prepared = MadeSource(units=equal_units(2).units).prepared(plan_of(batch=1), cluster_of(1, FREE))
    assert (explain_plan(prepared).change, explain_plan(prepared).num_tried) == (None, 0)


def test_a_codec_goes_with_its_links() -> None:
    """Replicas have no links to compress: they are offered to a plan with a codec too."""
    plan = replace(PLANS["few micro-batches"], codec="bf16")
    prepared = MadeSource(units=random_units(8, 6)).prepared(plan, cluster_of(2))
    assert "data=2 instead of pipeline=2" in offered(prepared)


def of_the_run(plan: Plan) -> PreparedPlan:
    """A run's plan over units that a profile took to be a hundred times as long as they were."""
    units = [replace(unit(name, 0.1, (0.05, 0.05)), name=name) for name in ("layers.0", "head")]
    return MadeSource(units=tuple(units), overheads=ModelOverheads()).prepared(
        replace(plan, devices=()), cluster_of(2, FREE)
    )


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
    trace = read_trace(run)
    overhead_s = mean_parts(breakdown(trace, trace.median_step))["overhead"]
    assert named["overhead"] == pytest.approx(overhead_s), "one number for the chart and the table"
    assert overhead_s > 0
    assert named["unexplained"] + named["overhead"] == pytest.approx(0.2 - 3 * 0.030)


def test_contention_is_not_overhead() -> None:
    source = MadeSource(units=random_units(8, 1), tensors=(1, 2))
    plan = plan_of(Mesh(data=2), batch=16, microbatches=1)
    with_both = source.prepared(plan, cluster_of(2), overheads=EngineOverheads(step_s=0.1, contention=0.5))
    named = {one.name: one.seconds for one in explain_plan(with_both).parts.parts}
    assert named["overhead"] == pytest.approx(0.1)
    assert named["contention"] > 0


@pytest.mark.parametrize("recompute", ["none", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_stages_are_those_of_their_actions(schedule: str, recompute: str) -> None:
    """A forecast of each action, taken for a measurement, gives the same stages: whole backwards and halves."""
    plan = plan_of(Mesh(pipeline=2), microbatches=4, schedule=schedule, recompute=recompute)
    overheads = ModelOverheads(loss_backward_s=0.1, accumulate_s_per_byte=1e-6, split_input=1.5, split_weight=1.25)
    costs = MadeSource(units=tuple(random_units(4, 3)), overheads=overheads).prepared(plan, cluster_of(2, FREE)).costs
    for index, stage in enumerate(costs.stages):
        loss = costs.model_overheads.loss_backward_s * costs.contention if index == len(costs.stages) - 1 else 0.0
        again = stage.forward_s if recompute == "always" else 0.0
        both = stage.backward_input_s + stage.backward_weight_s
        if schedule == "1f1b":
            seconds = {"backward": both + again + loss + stage.accumulate_s}
        elif index == 0:
            seconds = {"backward-weight": both + again + stage.accumulate_s}
        elif recompute == "always":
            seconds = {"backward-input": both + again + loss + stage.accumulate_s, "backward-weight": 0.0}
        else:
            seconds = {
                "backward-input": 1.5 * stage.backward_input_s + loss,
                "backward-weight": 1.25 * stage.backward_weight_s + stage.accumulate_s,
            }
        found = _stage_as_measured(costs, index, {"forward": stage.forward_s, **seconds})
        assert found.backward_input_s == pytest.approx(stage.backward_input_s)
        assert found.backward_weight_s == pytest.approx(stage.backward_weight_s)


def test_a_run_without_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path, "pipeline=2", schedule="gpipe")
    prepared = of_the_run(run.plan())
    run.finish("failed", {"error": "gone"})
    with pytest.raises(UsageError, match="has no measured steps: explain a run that"):
        explain_run(prepared, run)
