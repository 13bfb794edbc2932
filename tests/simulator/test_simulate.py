"""Whole forecasts, with numbers that a pencil gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from made_profiles import equal_units, make_costs, profile_of, unit
from stagewright.cluster.cluster import Cluster, DeviceGroup, Link, Links
from stagewright.errors import UsageError
from stagewright.profiler.profile import Amount, Time
from stagewright.simulator.collective import Group, all_reduce_s
from stagewright.simulator.costs.link_codec import LinkCodec
from stagewright.simulator.costs.overheads import EngineOverheads, ModelOverheads
from stagewright.simulator.costs.tensor_traffic import TensorTraffic
from stagewright.simulator.gradient_allreduce import predict_gradient_allreduce
from stagewright.simulator.simulate import predict, step_seconds
from stagewright.simulator.step_times import _by_wavefront, pipeline_times
from stagewright.simulator.topology import Topology
from stagewright.spec.plan import Mesh

SLOW = Links(intra_host=Link(bandwidth_bytes_per_s=10.0, latency_s=0.0))  # ten bytes take a second


def test_transfer_fills_the_pipeline() -> None:
    """Two stages of F = 1, B = 2, messages of 1 s: F0, message, F1, B1, gradient, B0, one after the other."""
    forecast = predict(make_costs(equal_units(2), mesh=Mesh(pipeline=2), schedule="gpipe", links=SLOW))
    assert forecast.step_s == 1 + 1 + 1 + 2 + 1 + 2
    assert forecast.serial_s == 6
    assert forecast.speedup == pytest.approx(6 / 8)
    assert [worker.idle_s for worker in forecast.workers] == [5, 5]
    assert [(link.num_bytes, link.busy_s) for link in forecast.links] == [(20, 2.0)]
    streams = {segment.stream for segment in forecast.segments}
    assert streams == {"compute", "send", "receive"}


def test_a_codec_saves_bytes_and_takes_time() -> None:
    codec = LinkCodec(ratio=0.5, encode_s_per_byte=0.01, decode_s_per_byte=0.02)
    costs = make_costs(equal_units(2), mesh=Mesh(pipeline=2), schedule="gpipe", links=SLOW, terms={"codecs": [codec]})
    forecast = predict(costs)
    assert forecast.links[0].num_bytes == 10
    # Both messages take half a second; both ends of both take 0.1 s to encode and 0.2 s to decode.
    assert forecast.step_s == pytest.approx(8 - 1 + 2 * 0.3)


def test_a_bad_codec() -> None:
    with pytest.raises(UsageError, match="ratio of 0"):
        LinkCodec(ratio=0)


def test_tensor_collectives_stop_computing() -> None:
    traffic = [TensorTraffic(forward_bytes=(10, 10), backward_bytes=(20,))] * 2
    costs = make_costs(equal_units(2), mesh=Mesh(tensor=2), links=SLOW, terms={"tensor": traffic})
    # Among two, an all-reduce of S bytes moves S: forward 2 · 1 s, backward 2 s, for each of two units.
    assert step_seconds(costs) == 2 * (1 + 2) + 2 * (2 + 2)
    again = make_costs(equal_units(2), mesh=Mesh(tensor=2), links=SLOW, terms={"tensor": traffic}, recompute="always")
    assert step_seconds(again) == step_seconds(costs) + 2 * (1 + 2), "the forward again has its collectives again"


def test_data_sums_hide_behind_the_backward() -> None:
    """Two buckets of 8 MiB, 4 s each: the first leaves in the middle of a backward of 10 s, the second after it."""
    mebibyte = 1 << 20
    units = [unit(f"u{at}", 1.0, (5.0, 0.0), parameter_bytes=Amount(total=8 * mebibyte)) for at in range(2)]
    links = Links(intra_host=Link(bandwidth_bytes_per_s=2 * mebibyte, latency_s=0.0))
    costs = make_costs(profile_of(units), mesh=Mesh(data=2), links=links)
    sums = predict_gradient_allreduce(costs, pipeline_times(costs), 0)
    assert sums.spans_s == ((7.0, 11.0), (12.0, 16.0))
    assert step_seconds(costs) == pytest.approx(16.0), "and the loss of both replicas"
    # If the device is busy with the all-reduce, overlapped compute takes that much longer.
    busy = make_costs(
        profile_of(units),
        mesh=Mesh(data=2),
        links=links,
        terms={"engine_overheads": EngineOverheads(collective_share=1.0)},
    )
    assert step_seconds(busy) == pytest.approx(20.0, rel=0.02)
    # At half the pace beside computing, 5 s until that ends do 2.5 s of the first; the rest takes 1.5 s alone.
    slow = EngineOverheads(collective_pace=0.5)
    costs = make_costs(profile_of(units), mesh=Mesh(data=2), links=links, terms={"engine_overheads": slow})
    assert predict_gradient_allreduce(costs, pipeline_times(costs), 0).spans_s == ((7.0, 13.5), (13.5, 17.5))
    # Both: each second beside each other costs computing 0.25 s.
    both = EngineOverheads(collective_share=0.25, collective_pace=0.8)
    costs = make_costs(profile_of(units), mesh=Mesh(data=2), links=links, terms={"engine_overheads": both})
    sums = predict_gradient_allreduce(costs, pipeline_times(costs), 0)
    assert sums.slowed_s == pytest.approx(0.25 * 5, rel=0.05), "the first is done in its 5 s"
    assert both.collective_cost == pytest.approx(0.25 / 0.8)


def test_a_gradient_leaves_when_its_unit_is_done() -> None:
    """An embedding of three buckets, whose backward is the last 5 of 10 s: none of them leaves before its end."""
    size = 8 << 20
    units = [
        unit("embedding", 1.0, (0.0, 5.0), parameter_bytes=Amount(total=3 * size)),
        unit("block", 1.0, (5.0, 0.0), parameter_bytes=Amount(total=size)),
    ]
    links = Links(intra_host=Link(bandwidth_bytes_per_s=float(size), latency_s=0.0))
    sums = predict_gradient_allreduce(
        costs := make_costs(profile_of(units), mesh=Mesh(data=2), links=links), pipeline_times(costs), 0
    )
    assert sums.spans_s == ((7.0, 8.0), (12.0, 13.0), (13.0, 14.0), (14.0, 15.0))
    # The gradient of a head tied to the embedding is complete with the embedding's.
    tied = unit("head", 1.0, (5.0, 0.0), parameter_bytes=Amount(total=3 * size, shares=((0, 3 * size),)))
    costs = make_costs(profile_of([*units, tied]), mesh=Mesh(data=2), links=links)
    assert [begin for begin, _ in predict_gradient_allreduce(costs, pipeline_times(costs), 0).spans_s] == [
        13.0,
        18.0,
        19.0,
        20.0,
    ]


def test_halves_of_a_backward_take_longer_than_the_whole() -> None:
    """Four stages on two workers: F = I = W = 1 s; all but the first do their backward in halves."""
    profile, terms = equal_units(4, 1.0, (1.0, 1.0)), ModelOverheads(split_input=1.25, split_weight=1.5)
    shape = {"mesh": Mesh(pipeline=2), "microbatches": 4, "schedule": "zbv", "stages": 4}

    def computing(terms: ModelOverheads, **more: str) -> list[float]:
        found = predict(make_costs(profile, terms={"model_overheads": terms}, **shape, **more))  # type: ignore[arg-type]
        return [worker.compute_s for worker in found.workers]

    assert computing(ModelOverheads()) == [24.0, 24.0]
    assert computing(terms) == [24.0 + 4 * 0.75, 24.0 + 2 * 4 * 0.75]
    again = {"recompute": "always"}
    assert computing(terms, **again) == computing(ModelOverheads(), **again), (
        "a stage that runs again does it in one piece"
    )


def test_a_whole_that_is_not_surely_known_scales_nothing() -> None:
    """Units of 2 × 1 s forward; the whole was measured to take 3 s, give or take."""
    profile = equal_units(2)
    found = {}
    for spread in (0.0, 0.5, 2.0):
        whole = Time(median_s=3.0, spread_s=spread)
        found[spread] = step_seconds(make_costs(replace(profile, whole_forward=whole), mesh=Mesh()))
    assert found == pytest.approx({0.0: 3.0 + 4.0, 0.5: 2.5 + 4.0, 2.0: 2.0 + 4.0})


def test_overheads_are_added_where_they_belong() -> None:
    engine = EngineOverheads(action_s=0.1, step_s=1.0, chunk_s=0.5)
    model = ModelOverheads(
        loss_forward_s=0.2, loss_backward_s=0.3, optimizer_s_per_byte=0.01, accumulate_s_per_byte=0.001
    )
    costs = make_costs(
        equal_units(1), mesh=Mesh(), microbatches=3, terms={"engine_overheads": engine, "model_overheads": model}
    )
    computed = 3 * (3 + 0.5) + 6 * 0.1 + 2 * 100 * 0.001
    assert step_seconds(costs) == pytest.approx(computed + 100 * 0.01 + 1.0 + 3 * 0.5)


def test_contention_slows_compute() -> None:
    costs = make_costs(equal_units(2), mesh=Mesh(data=2), terms={"engine_overheads": EngineOverheads(contention=0.25)})
    assert step_seconds(costs) == pytest.approx(6 * 1.25)
    four = make_costs(equal_units(2), mesh=Mesh(data=4), terms={"engine_overheads": EngineOverheads(contention=0.25)})
    assert step_seconds(four) == step_seconds(costs)  # measured with two; not multiplied


def test_replicas_copy_gradients_into_buckets() -> None:
    model = ModelOverheads(accumulate_s_per_byte=0.001)
    plain = step_seconds(make_costs(equal_units(2), mesh=Mesh(data=2)))
    copied = step_seconds(make_costs(equal_units(2), mesh=Mesh(data=2), terms={"model_overheads": model}))
    assert copied == pytest.approx(plain + 2 * 100 * 0.001)
    alone = step_seconds(make_costs(equal_units(2), mesh=Mesh(), terms={"model_overheads": model}))
    assert alone == pytest.approx(step_seconds(make_costs(equal_units(2), mesh=Mesh())))


def test_slow_devices_and_hosts() -> None:
    cluster = Cluster(
        devices=(
            DeviceGroup(kind="cpu", count=1, host="a", memory_bytes=10_000),
            DeviceGroup(kind="cpu", count=1, host="b", speed=0.5, memory_bytes=500),
        ),
        links=Links(inter_host=Link(bandwidth_bytes_per_s=10.0, latency_s=0.0)),
    )
    costs = make_costs(equal_units(2), mesh=Mesh(pipeline=2), schedule="gpipe", cluster=cluster)
    forecast = predict(costs)
    assert forecast.step_s == 1 + 1 + 2 + 4 + 1 + 2
    assert [worker.fits for worker in forecast.workers] == [True, False]
    assert not forecast.fits


def test_too_few_devices() -> None:
    cluster = Cluster(devices=(DeviceGroup(kind="cpu", count=2),))
    with pytest.raises(UsageError, match="has 4 workers, but the cluster has 2 devices"):
        Topology(mesh=Mesh(data=4), cluster=cluster)


def test_groups_lie_on_hosts_as_ranks_do() -> None:
    cluster = Cluster(
        devices=(DeviceGroup(kind="cuda", count=4, hosts=2),),
        links=Links(inter_host=Link(bandwidth_bytes_per_s=1e9, latency_s=0.0)),
    )
    topology = Topology(mesh=Mesh(data=2, pipeline=4), cluster=cluster)
    assert topology.group("data").num_hosts == 2
    assert topology.group("pipeline").num_hosts == 1
    tensor = Topology(mesh=Mesh(tensor=2, pipeline=4), cluster=cluster)
    assert tensor.group("tensor").num_hosts == 2, "the engine's ranks have the pipeline innermost"
    assert Topology(mesh=Mesh(tensor=2, pipeline=4), cluster=cluster, innermost="tensor").group("tensor").num_hosts == 1


def test_tensor_groups_of_one_host_have_links_of_their_own() -> None:
    slow, fast = (Link(bandwidth_bytes_per_s=rate, latency_s=0.0) for rate in (1e9, 4e9))
    links = Links(inter_host=slow, collective=slow, tensor=fast, tensor_sums=((8, 1e-5),))

    def tensor_group(**mesh: int) -> Group:
        cluster = Cluster(devices=(DeviceGroup(kind="cpu", count=4, hosts=2),), links=links)
        return Topology(mesh=Mesh(**mesh), cluster=cluster).tensor_group(mesh["tensor"])

    inside = tensor_group(data=2, tensor=4)
    assert (inside.inside, inside.allreduce_points) == (fast, ((8, 1e-5),))
    assert all_reduce_s(replace(inside, allreduce_points=()), 4e9) == pytest.approx(1.5)
    across = tensor_group(tensor=8)
    assert (across.outside, across.allreduce_points) == (slow, ())


@pytest.mark.parametrize("recompute", ["none", "always", "except-last"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_long_pipelines_are_forecast_alike(schedule: str, recompute: str) -> None:
    generator = np.random.default_rng(3)
    units = [
        unit(f"u{at}", *generator.random(1), tuple(generator.random(2)), crossing_bytes=int(generator.integers(1, 9)))
        for at in range(4)
    ]
    terms = {
        "model_overheads": ModelOverheads(accumulate_s_per_byte=0.001),
        "engine_overheads": EngineOverheads(action_s=0.01),
    }
    costs = make_costs(
        profile_of(units),
        mesh=Mesh(pipeline=4),
        microbatches=9,
        schedule=schedule,
        links=SLOW,
        recompute=recompute,
        terms=terms,
    )
    listed, waves = pipeline_times(costs), _by_wavefront(costs)
    assert waves.length_s == pytest.approx(listed.length_s)


def test_a_profile_without_backward_trains_nothing() -> None:
    with pytest.raises(UsageError, match="only forward passes"):
        make_costs(profile_of([unit("u", 1.0, (0.0, 0.0))], training=False), mesh=Mesh())


def test_replicas_average_the_statistics_of_batch_norm() -> None:
    """2 s of work and 40 bytes to sum, 4 s, when all gradients are summed; two workers of a pipeline have half each."""
    terms = {"model_overheads": ModelOverheads(statistics_s=2.0, statistics_bytes=40)}
    profile = equal_units(2, buffer_bytes=16)

    def steps(mesh: Mesh, **more: str) -> tuple[float, float]:
        plain = make_costs(profile, mesh=mesh, links=SLOW, **more)  # type: ignore[arg-type]
        averaged = make_costs(profile, mesh=mesh, links=SLOW, terms=terms, **more)  # type: ignore[arg-type]
        return predict(plain).step_s, predict(averaged).step_s

    one, other = steps(Mesh(data=2))
    assert other == pytest.approx(one + 2.0 + 4.0)
    one, other = steps(Mesh(data=2, pipeline=2), schedule="gpipe")
    assert other == pytest.approx(one + 1.0 + 2.0)
    for mesh, more in ((Mesh(), {}), (Mesh(pipeline=2), {}), (Mesh(data=2), {"batch_norm": "deferred"})):
        one, other = steps(mesh, **more)
        assert other == one, f"{mesh} {more}: nothing to average over, or not so"
    found = predict(make_costs(profile, mesh=Mesh(data=2), links=SLOW, terms=terms))
    without = predict(make_costs(profile, mesh=Mesh(data=2), links=SLOW))
    assert found.data_bytes == without.data_bytes + 40
    assert found.workers[0].data_s == pytest.approx(without.workers[0].data_s + 6.0)


@pytest.mark.parametrize("pieces", [1, 2])
def test_gradients_of_several_micro_batches_are_made_beside_their_buckets(pieces: int) -> None:
    """Where an allocator tells: buckets of 200 bytes are always there; of two pieces the first makes 200 more."""
    profile = equal_units(2)
    units = tuple(replace(one, forward_working_bytes=1, backward_working_bytes=1) for one in profile.units)
    told = replace(profile, units=units)
    memory = predict(make_costs(told, mesh=Mesh(data=2), microbatches=pieces)).workers[0].memory
    begun, *later = memory.held_bytes
    assert later[-1] == begun
    assert (begun + 200 in later) == (pieces == 2)


@pytest.mark.parametrize(("microbatches", "expected"), [(1, 3.0), (4, 3.0 + 3 * 1.5)])
def test_a_microbatch_that_follows_another_takes_its_measured_time(microbatches: int, expected: float) -> None:
    """On a GPU, the host launches one while the kernels of the other still run."""
    profile = replace(equal_units(1), first_pass_s=3.0, following_pass_s=1.5)
    costs = make_costs(profile, mesh=Mesh(), microbatches=microbatches)
    assert predict(costs).step_s == pytest.approx(expected)
