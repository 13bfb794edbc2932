"""The search finds what trying everything finds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from tests.planner.conftest import SLOW, MadeSource, cluster_of, plan_of, random_units

from made_profiles import profile_of
from stagewright.cluster.cluster import Cluster, DeviceGroup, Link, Links
from stagewright.errors import UsageError
from stagewright.partition.conditions import Conditions
from stagewright.partition.split import split
from stagewright.planner.costs.device_speeds import with_cluster_speeds
from stagewright.planner.costs.measure import ModelCosts, plan_microbatch_sizes
from stagewright.planner.search import search as searching
from stagewright.planner.search.choices import SearchSpace, enumerate_plans
from stagewright.planner.search.search import search
from stagewright.profiler.profile import Amount, Time
from stagewright.report.tables.plan import plan_remarks
from stagewright.schedules.rules import FIXED_SCHEDULES, SCHEDULES
from stagewright.simulator.costs.link_codec import LinkCodec
from stagewright.simulator.costs.overheads import EngineOverheads
from stagewright.simulator.forecast import Forecast
from stagewright.simulator.simulate import predict
from stagewright.simulator.topology import Topology
from stagewright.spec.plan import Mesh, OptimizerSpec, Plan
from stagewright.spec.plan_rules import check_plan
from stagewright.spec.unequal_devices import replica_sizes

BATCH, COUNT = 8, 4
FAST = EngineOverheads(action_s=0.01, step_s=0.05, chunk_s=0.01, collective_share=0.5, contention=0.05)


def every_plan(source: MadeSource, cluster: Cluster, base: Plan) -> list[tuple[Plan, Forecast]]:
    """Each allowed plan on all devices, forecast one by one, with nothing that the search does to be quick."""
    found = []
    for mesh in every_mesh(source, cluster):
        for chunks, schedule, recompute, shard, gather in itertools.product(
            (1, 2, 4, 8), FIXED_SCHEDULES, ("none", "always"), (False, True), ("auto", "microbatch")
        ):
            if mesh.pipeline == 1 and schedule != "1f1b":
                continue  # the same as 1f1b
            if SCHEDULES[schedule].splits_backward and recompute != "none":
                continue
            if gather != "auto" and (mesh.pipeline == 1 or not shard):
                continue  # the same as auto
            plan = replace(
                base,
                mesh=mesh,
                microbatches=chunks,
                schedule=schedule,
                recompute=recompute,
                shard=shard,
                fsdp_gather=gather,
            )
            try:
                check_plan(plan)
                by_speed = with_cluster_speeds(plan, cluster)
                if min(replica_sizes(by_speed, plan.batch)) >= plan.microbatches:
                    plan = by_speed
                cuts = best_cuts(source, cluster, plan)
                prepared = source.prepared(replace(plan, cuts=cuts), cluster, overheads=FAST)
            except UsageError:
                continue
            found.append((plan, prepared.forecast()))
    return found


def every_mesh(source: MadeSource, cluster: Cluster) -> list[Mesh]:
    """Each mesh on all devices; where they differ, also with another tensor degree for one stage."""
    count = cluster.num_devices
    sizes = [size for size in range(1, count + 1) if count % size == 0]
    meshes = [
        Mesh(data=data, tensor=tensor, pipeline=pipeline)
        for data, tensor, pipeline in itertools.product(sizes, sizes, sizes)
        if data * tensor * pipeline == count and tensor in source.tensors
    ]
    if len({(device.speed, device.memory_bytes) for device in cluster.members}) == 1:
        return meshes
    for pipeline in range(2, count):
        for degrees in itertools.product(source.tensors, repeat=pipeline):
            others = min(degrees.count(degree) for degree in set(degrees))
            if len(set(degrees)) == 2 and others == 1 and count % sum(degrees) == 0:
                meshes.append(Mesh(data=count // sum(degrees), pipeline=pipeline, tensor_degrees=degrees))
    return meshes


def half_fits(tried: list[tuple[Plan, Forecast]]) -> int:
    """Memory that suffices for half of the plans."""
    return sorted(one.peak_memory_bytes for _, one in tried)[len(tried) // 2]


def best_cuts(source: MadeSource, cluster: Cluster, plan: Plan) -> tuple[str, ...]:
    if plan.num_stages == 1:
        return ()
    if plan.num_stages > source.num_units:
        raise UsageError("too few units")
    shares = replica_sizes(plan, plan.batch) if plan.speeds else ()
    speeds, degrees = Topology(mesh=plan.mesh, cluster=cluster, shares=shares).speeds(), plan.mesh.tensor_degrees
    stages = [speeds[one] * (degrees[one] if degrees else 1) for one in plan.stage_workers]
    conditions = Conditions(speeds=stages, recompute=plan.recompute != "none")
    profile = source.model(1, 1 if degrees else plan.mesh.tensor).profile
    return split(profile, plan.num_stages, "optimal", conditions).cut_names


def described(plan: Plan) -> tuple[Any, ...]:
    return plan.mesh, plan.microbatches, plan.schedule, plan.recompute, plan.shard, plan.fsdp_gather


def quick_search(
    source: MadeSource, cluster: Cluster, base: Plan | None = None, **options: Any
) -> searching.SearchResult:
    return search(base or plan_of(batch=BATCH), source, cluster, FAST, **{"by_unit": False, **options})


@pytest.mark.parametrize("seed", range(8))
def test_finds_what_trying_everything_finds(seed: int) -> None:
    source = MadeSource(units=random_units(6, seed), tensors=(1, 2))
    base = plan_of(batch=BATCH, optimizer=OptimizerSpec(name="adam"))
    memory = half_fits(every_plan(source, cluster_of(COUNT), base)) if seed % 2 else None
    fast = DeviceGroup(kind="cpu", count=2, speed=1 + seed % 3, memory_bytes=memory)
    cluster = Cluster(
        devices=(fast, DeviceGroup(kind="cpu", count=2, memory_bytes=memory)), links=Links(intra_host=SLOW)
    )
    tried = every_plan(source, cluster, base)
    fitting = sorted((one for one in tried if one[1].fits), key=lambda one: one[1].step_s)
    assert len(fitting) > 10
    assert memory is None or len(fitting) < len(tried), "the memory must be one that matters"
    found = quick_search(source, cluster, base)
    assert [one.forecast.step_s for one in found.best] == pytest.approx([one.step_s for _, one in fitting[:10]])
    assert described(found.best[0].plan) == described(fitting[0][0])
    assert found.num_exact < len(tried), "the bound spares some"
    everything = quick_search(source, cluster, base, top=1000)
    assert {described(one.plan) for one in everything.best} == {described(plan) for plan, _ in fitting}
    for one in everything.best:
        assert one.plan.mesh.num_workers == COUNT
        assert one.forecast.fits
        check_plan(one.plan)


def test_plain_data_parallel_stands_beside() -> None:
    source = MadeSource(units=random_units(6, 0))
    found = quick_search(source, cluster_of(COUNT), top=1)
    assert found.data_parallel is not None
    plan = found.data_parallel.plan
    assert (plan.mesh, plan.microbatches, plan.recompute, plan.shard) == (Mesh(data=COUNT), 1, "none", False)
    forecast = source.prepared(plan, cluster_of(COUNT), overheads=FAST).forecast()
    assert found.data_parallel.forecast.step_s == pytest.approx(forecast.step_s)
    # Where parameters alone are too much, it is shown all the same, and does not fit.
    every = sum(one.parameter_bytes.total for one in source.units)
    small = quick_search(source, cluster_of(COUNT, memory_bytes=2 * every - 1), shards=(False,))
    assert small.data_parallel is not None
    assert not small.data_parallel.forecast.fits
    assert all(one.plan.mesh.data < COUNT for one in small.best)
    # Where it fits in smaller micro-batches, it has the fewest that do.
    light = MadeSource(units=tuple(replace(one, parameter_bytes=Amount(total=16)) for one in source.units))
    free = quick_search(light, cluster_of(COUNT)).data_parallel
    assert free is not None
    assert free.costs is not None
    whole = predict(free.costs).peak_memory_bytes
    chunked = quick_search(light, cluster_of(COUNT, memory_bytes=whole - 1)).data_parallel
    assert chunked is not None
    assert chunked.plan.microbatches == 2
    assert chunked.forecast.fits
    few = quick_search(source, cluster_of(COUNT), plan_of(batch=COUNT - 1))
    assert few.data_parallel is None


def test_shares_follow_the_speeds_of_devices() -> None:
    """Data parallelism on devices of speeds 2, 2, 1, 1 takes about two thirds of its time with equal shares."""
    source = MadeSource(units=random_units(6, 0), tensors=(1,))
    slow = DeviceGroup(kind="cpu", count=2)
    cluster = Cluster(devices=(replace(slow, speed=2.0), slow), links=Links(intra_host=SLOW))
    found = quick_search(source, cluster, plan_of(batch=48), top=60)
    plans = [one for one in found.best if one.plan.mesh == Mesh(data=4) and not one.plan.shard]
    assert plans
    best = plans[0].plan
    assert best.speeds == (1.0, 1.0, 0.5, 0.5)
    equal = source.prepared(replace(best, speeds=()), cluster, overheads=FAST).forecast()
    shared = source.prepared(best, cluster, overheads=FAST).forecast()
    assert 2 / 3 < shared.step_s / equal.step_s < 0.75, "all-reduces and overheads stay"
    assert source.prepared(replace(best, speeds="measured"), cluster, overheads=FAST).forecast().step_s == shared.step_s


def test_one_device_stands_beside() -> None:
    """The fastest one, in as many micro-batches as is quickest there: speed-ups are over it."""
    source = MadeSource(units=random_units(6, 0))
    slow = DeviceGroup(kind="cpu", count=2)
    cluster = Cluster(devices=(slow, replace(slow, speed=2.0)), links=Links(intra_host=SLOW))
    found = quick_search(source, cluster)
    assert found.serial is not None
    plan = found.serial.plan
    assert (plan.mesh, plan.microbatches) == (Mesh(), 1), "more of them would only add to the engine's work"
    fast = Cluster(devices=(replace(slow, count=1, speed=2.0),))
    assert found.serial.forecast.step_s == pytest.approx(source.prepared(plan, fast, overheads=FAST).forecast().step_s)
    assert found.serial.forecast.speedup == 1.0
    for one in found.best:
        assert one.forecast.speedup == pytest.approx(found.serial.forecast.step_s / one.forecast.step_s)
    # Where the whole batch is too much for one, it has the micro-batches that fit; where nothing fits, that is said.
    light = MadeSource(units=tuple(replace(one, parameter_bytes=Amount(total=16)) for one in source.units))
    peak = quick_search(light, cluster_of(COUNT)).serial
    assert peak is not None
    tight = quick_search(light, cluster_of(COUNT, memory_bytes=peak.forecast.peak_memory_bytes - 1)).serial
    assert tight is not None
    assert tight.plan.microbatches > 1
    assert tight.forecast.fits
    every = sum(one.parameter_bytes.total for one in source.units)
    none = quick_search(source, cluster_of(COUNT, memory_bytes=2 * every - 1)).serial
    assert none is not None
    assert not none.forecast.fits


class Sharpened(MadeSource):
    """A model whose micro-batches take longer, when they are measured, than the line between two others says."""

    def measure_size(self, size: int, tensor: int) -> bool:
        if (size, tensor) in asked:
            return False
        asked.append((size, tensor))
        return True

    def model(self, size: int, tensor: int) -> ModelCosts:
        found = super().model(size, tensor)
        slower = 3.0 if (size, tensor) in asked else 1.0
        units = [
            replace(one, forward=Time(median_s=slower * one.forward.median_s, spread_s=0.0))
            for one in found.profile.units
        ]
        return replace(found, profile=profile_of(units, batch_size=size))


asked: list[tuple[int, int]] = []


@pytest.mark.parametrize("count", [1, 3])
def test_the_best_is_by_a_measurement_of_its_own(count: int) -> None:
    asked.clear()
    found = quick_search(Sharpened(units=random_units(6, 0)), cluster_of(COUNT), num_measured=count)
    assert len(asked) > 1, "the first that was measured is no longer the best"
    for one in found.best[:count]:
        assert (max(plan_microbatch_sizes(one.plan)), one.plan.mesh.tensor) in asked
    steps = [one.forecast.step_s for one in found.best]
    assert steps == sorted(steps)
    first = Sharpened(units=random_units(6, 0)).prepared(found.best[0].plan, cluster_of(COUNT), overheads=FAST)
    assert first.forecast().step_s == pytest.approx(steps[0]), "a forecast of the plan says the same"


def test_one_device_is_by_a_measurement_of_its_own() -> None:
    """The line says a third of what one device is measured to take: speed-ups are over what was measured."""
    asked.clear()
    source = Sharpened(units=random_units(6, 0))
    found = quick_search(source, cluster_of(COUNT))
    assert found.serial is not None
    assert (max(plan_microbatch_sizes(found.serial.plan)), 1) in asked
    again = source.prepared(found.serial.plan, cluster_of(1), overheads=FAST).forecast()
    assert found.serial.forecast.step_s == pytest.approx(again.step_s)
    for one in found.best:
        assert one.forecast.serial_s == pytest.approx(again.step_s)


def test_more_than_there_are_devices_is_remarked_on() -> None:
    source = MadeSource(units=random_units(6, 0))
    found = quick_search(source, cluster_of(COUNT))
    assert not any("superlinear" in line for line in plan_remarks(found))
    first = found.best[0]
    found.best[0] = replace(first, forecast=replace(first.forecast, speedup=5.96))
    assert "5.96 × on 4 devices is superlinear: small micro-batches take less" in plan_remarks(found)[-1]
    assert found.serial is not None
    number = first.plan.microbatches
    found.serial = replace(found.serial, plan=replace(found.serial.plan, microbatches=number))
    assert "small micro-batches take less" in plan_remarks(found)[-1], "the best plan has as many"
    found.serial = replace(found.serial, plan=replace(found.serial.plan, microbatches=number + 1))
    assert f"the baseline accumulates gradients over {number + 1} micro-batches" in plan_remarks(found)[-1]
    found.is_serial_interpolated = True
    assert "the baseline was forecast from smaller micro-batches" in plan_remarks(found)[-1]


@pytest.mark.parametrize(("seed", "bandwidth"), [(0, 100.0), (2, 300.0), (3, 150.0), (7, 200.0)])
def test_the_best_does_not_depend_on_how_many_are_shown(seed: int, bandwidth: float) -> None:
    """Replicas may be the best of the plain plans, and a pipeline behind them the best under another schedule."""
    source = MadeSource(units=random_units(8, seed))
    cluster = cluster_of(COUNT, Link(bandwidth_bytes_per_s=bandwidth, latency_s=0.0))
    found = {top: search(plan_of(batch=BATCH), source, cluster, top=top).best for top in (1, 3, 10)}
    assert [len(one) for one in found.values()] == [1, 3, 10]
    assert len({one[0].forecast.step_s for one in found.values()}) == 1
    assert len({described(one.plan) for one in found[10]}) == 10, "none is shown twice"


def test_searched_orders_are_ranked_beside_fixed_schedules() -> None:
    """Where pipelines pay, an order for the measured times beats the fixed schedules on the same meshes."""
    heavy = tuple(replace(one, parameter_bytes=replace(one.parameter_bytes, total=4000)) for one in random_units(8, 3))
    source, cluster = MadeSource(units=heavy), cluster_of(COUNT, memory_bytes=60_000)
    fixed, both = (
        quick_search(source, cluster, schedules=schedules)
        for schedules in (FIXED_SCHEDULES, (*FIXED_SCHEDULES, "searched"))
    )
    best = both.best[0]
    assert best.plan.schedule == "searched"
    assert best.forecast.step_s < 0.99 * fixed.best[0].forecast.step_s
    for ranked in both.best:
        check_plan(ranked.plan)
        assert ranked.forecast.fits
        assert bool(ranked.plan.actions) == (ranked.plan.schedule == "searched")
    assert len({described(ranked.plan) for ranked in both.best}) == len(both.best), "none is shown twice"
    prepared = source.prepared(best.plan, cluster, overheads=FAST)
    assert prepared.plan == best.plan
    assert prepared.forecast().step_s == pytest.approx(best.forecast.step_s)


@pytest.mark.parametrize("name", ["zbv", "interleaved", "looped-bfs"])
def test_a_schedule_alone(name: str) -> None:
    """Where pipelines pay, a search among one schedule finds pipelines of that schedule, and nothing of others."""
    heavy = tuple(replace(one, parameter_bytes=replace(one.parameter_bytes, total=4000)) for one in random_units(8, 3))
    found = quick_search(MadeSource(units=heavy), cluster_of(COUNT, memory_bytes=60_000), schedules=(name,))
    pipelines = [one.plan for one in found.best if one.plan.mesh.pipeline > 1]
    assert pipelines
    assert {one.schedule for one in pipelines} == {name}


def test_a_codec_is_told_beside_the_ranking() -> None:
    """On slow links it gains: it is what trying every pipeline with it finds, and no ranked plan has it."""
    heavy = tuple(replace(one, parameter_bytes=replace(one.parameter_bytes, total=4000)) for one in random_units(8, 3))
    source, cluster = MadeSource(units=heavy), cluster_of(COUNT, memory_bytes=60_000)
    codecs = {"bf16": LinkCodec(ratio=0.5, encode_s_per_byte=1e-4), "block4": LinkCodec(ratio=0.2)}
    found = quick_search(source, cluster, extra_codecs=codecs)
    assert {one.codec for one in found.best} == {"none"}
    assert [one.plan for one in found.best] == [one.plan for one in quick_search(source, cluster).best]
    tried = []
    for name, codec in codecs.items():
        tried += quick_search(source, cluster, codecs={name: codec}, top=1000).best
    least = min((one for one in tried if one.codec != "none"), key=lambda one: one.forecast.step_s)
    assert found.with_codec is not None
    assert found.with_codec.forecast.step_s == pytest.approx(least.forecast.step_s)
    assert found.with_codec.plan.codec == found.with_codec.codec == "block4"
    assert found.with_codec.forecast.step_s < found.best[0].forecast.step_s
    slow = {"block4": LinkCodec(ratio=0.2, encode_s_per_byte=10.0)}
    assert quick_search(source, cluster, extra_codecs=slow).with_codec is None


def test_losers_are_told_why() -> None:
    """Data parallel in one piece does not fit, in pieces it does: it loses by its time, not by its memory."""
    units = tuple(
        replace(
            one,
            parameter_bytes=replace(one.parameter_bytes, total=800),
            saved_bytes=replace(one.saved_bytes, total=400),
        )
        for one in random_units(8, 2)
    )
    source = MadeSource(units=units)
    needed = {}
    for chunks in (1, 2):
        plan = plan_of(Mesh(data=COUNT), batch=2 * COUNT, microbatches=chunks)
        needed[chunks] = source.prepared(plan, cluster_of(COUNT)).forecast().peak_memory_bytes
    cluster = cluster_of(COUNT, memory_bytes=(needed[1] + needed[2]) // 2)
    found = quick_search(source, cluster, top=3, shards=(False,), recomputes=("none",))
    assert {one.plan.mesh.strategy for one in found.best} == {"pipeline"}
    assert "the time of the best" in found.losers["data"]
    tight = cluster_of(COUNT, memory_bytes=2 * 8 * 800 - 1)
    assert "does not fit" in quick_search(source, tight, top=3, shards=(False,)).losers["data"]


def test_many_that_do_not_fit_do_not_hide_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    source = MadeSource(units=random_units(6, 5))
    fitting = quick_search(source, cluster_of(COUNT), top=1000).best
    least = min(one.forecast.peak_memory_bytes for one in fitting)
    monkeypatch.setattr(searching, "_MAX_EXACT", 2)
    found = quick_search(source, cluster_of(COUNT, memory_bytes=least))
    assert found.best[0].forecast.peak_memory_bytes == least


def test_nothing_fits() -> None:
    source = MadeSource(units=random_units(6, 0))
    with pytest.raises(UsageError, match=r"no plan for a batch of 8 fits on 4 devices \(.*data does not fit: "):
        quick_search(source, cluster_of(COUNT, memory_bytes=100))
    with pytest.raises(UsageError, match="a batch of 1 is too small for every mesh of 7 devices: use --batch 7"):
        quick_search(source, cluster_of(7), plan_of(batch=1))


def test_counts() -> None:
    """Of the plans that were bounded, some were forecast; those that did not fit are of one or the other kind."""
    source = MadeSource(units=random_units(6, 4), tensors=(1, 2))
    base = plan_of(batch=BATCH)
    cluster = cluster_of(COUNT, memory_bytes=half_fits(every_plan(source, cluster_of(COUNT), base)))
    tried = every_plan(source, cluster, base)
    found = quick_search(source, cluster, top=1000)
    assert found.num_plans == len(tried)
    assert found.num_unfit == sum(not one.fits for _, one in tried)
    assert len(found.best) == found.num_plans - found.num_unfit


def test_hsdp_shards_inside_hosts() -> None:
    """Two hosts of two devices: replicas shard with those of their host, or with all."""
    only = {"schedules": ("1f1b",), "recomputes": ("none",), "shards": (True,), "zeros": (0,), "codecs": ("none",)}
    space = SearchSpace(**only, max_tensor=1, devices_per_host=2)  # type: ignore[arg-type]
    plans = [plan for plan, _ in enumerate_plans(plan_of(batch=BATCH), MadeSource(units=random_units(6, 0)), 4, space)]
    assert {plan.fsdp_shards for plan in plans if plan.mesh == Mesh(data=4)} == {None, 2}
    assert {plan.fsdp_shards for plan in plans if plan.mesh == Mesh(data=2, pipeline=2)} == {None}
