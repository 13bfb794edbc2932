"""A plan on more or fewer devices keeps its batch and its work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planner.conftest import FixedSource, MadeSource, cluster_of, plan_of, random_units

from made_profiles import equal_units
from stagewright.cluster.cluster import FREE, Cluster, DeviceGroup, Link, Links
from stagewright.errors import UsageError
from stagewright.planner.resize import resize_plan, resize_prepared
from stagewright.schedules.rules import SCHEDULES
from stagewright.spec.plan import Mesh
from stagewright.spec.plan_rules import check_plan


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_devices", [2, 3, 4, None])
def test_a_pipeline_gets_stages(schedule: str, num_devices: int | None) -> None:
    plan = plan_of(Mesh(pipeline=2), batch=48, microbatches=12, schedule=schedule)
    found = resize_plan(plan, num_devices, 8)
    check_plan(found)
    each = SCHEDULES[schedule].stages_per_worker
    assert found.mesh == Mesh(pipeline=num_devices or 8 // each)
    assert found.num_stages == each * found.mesh.pipeline
    assert found.schedule == schedule
    assert found.batch == 48


def test_a_pipeline_keeps_stages_that_it_names() -> None:
    plan = plan_of(Mesh(pipeline=2), batch=48, microbatches=12, schedule="interleaved", stages=6)
    assert resize_plan(plan, 4, 12).num_stages == 12
    assert resize_plan(plan, None, 13).mesh.pipeline == 4
    with pytest.raises(UsageError, match="made has 11 units and so at most 11 stages, not 12: use --devices 3,"):
        resize_plan(plan, 4, 11)
    check_plan(resize_plan(plan, 3, 11))


def test_a_pipeline_gets_micro_batches_as_far_as_there_are_samples() -> None:
    plan = plan_of(Mesh(pipeline=2), batch=6, microbatches=2)
    more = resize_plan(plan, 4, 8)
    assert (more.schedule, more.microbatches) == ("1f1b", 4)
    most = resize_plan(plan, 8, 8)
    assert (most.schedule, most.microbatches) == ("gpipe", 6), "1F1B would need eight"
    check_plan(most)


def test_replicas_get_samples() -> None:
    plan = plan_of(Mesh(data=2, tensor=2), batch=24, microbatches=3)
    assert resize_plan(plan, 8, 5).mesh == Mesh(data=4, tensor=2)
    assert resize_plan(plan, None, 5).mesh == Mesh(data=8, tensor=2), "one sample of each micro-batch"
    check_plan(resize_plan(plan, None, 5))
    with pytest.raises(UsageError, match="5 devices can't be divided into groups of 2"):
        resize_plan(plan, 5, 5)
    with pytest.raises(UsageError, match="is enough for at most 8 replicas, not 9: use --devices 16,"):
        resize_plan(plan, 18, 5)
    both = resize_plan(plan_of(Mesh(data=2, pipeline=2), batch=24, microbatches=4), 8, 5)
    assert both.mesh == Mesh(data=4, pipeline=2), "stages stay where there are replicas"


def test_the_work_stays_the_same() -> None:
    source = MadeSource(units=random_units(8, 0))
    prepared = source.prepared(plan_of(Mesh(pipeline=2), batch=16, microbatches=8), cluster_of(2, FREE))
    more = resize_prepared(prepared, 8)
    assert more.cluster.num_devices == 8
    assert more.costs.serial_s == pytest.approx(prepared.costs.serial_s)
    assert sum(more.costs.shares) == pytest.approx(sum(prepared.costs.shares))
    for name in ("forward_s", "backward_input_s", "backward_weight_s", "parameter_bytes", "saved_bytes"):
        before, after = (sum(getattr(one, name) for one in each.costs.stages) for each in (prepared, more))
        assert after == pytest.approx(before), name
    again = resize_prepared(more, 2)
    assert again.forecast().step_s == pytest.approx(prepared.forecast().step_s)


def test_smaller_shares_are_what_they_are_measured_to_be() -> None:
    """Replicas with fewer samples each, where a part of the time does not go with them."""
    source = FixedSource(units=equal_units(4).units)
    prepared = source.prepared(plan_of(Mesh(data=2), batch=16), cluster_of(2, FREE))
    for count in (4, 16):
        found = resize_prepared(prepared, count)
        assert found.measured.profile.batch_size == 16 // count
        alone = source.prepared(plan_of(Mesh(data=count), batch=16), cluster_of(count, FREE))
        assert found.forecast().step_s == pytest.approx(alone.forecast().step_s)
        # What is known of one size alone is taken in proportion.
        scaled = resize_prepared(replace(prepared, source=None), count).forecast().step_s
        assert scaled < found.forecast().step_s


def test_equal_replicas_reach_n() -> None:
    source = MadeSource(units=equal_units(4).units)
    prepared = source.prepared(plan_of(Mesh(data=2), batch=16), cluster_of(2, FREE))
    for count in (1, 4, 16):
        found = resize_prepared(prepared, count).forecast()
        computed = [one.compute_s for one in found.workers]
        assert computed == pytest.approx([16 / count * (4 * 3 + 0.2)])


def test_hosts_are_filled() -> None:
    links = Links(intra_host=FREE, inter_host=Link(bandwidth_bytes_per_s=100.0, latency_s=0.1))
    cluster = Cluster(devices=(DeviceGroup(kind="cpu", count=4, hosts=2, speed=2.0, memory_bytes=10**6),), links=links)
    prepared = MadeSource(units=random_units(8, 0)).prepared(plan_of(Mesh(data=8), batch=32), cluster)
    for count, hosts, on_host in ((2, 1, 2), (4, 1, 4), (12, 3, 4), (32, 8, 4)):
        group = resize_prepared(prepared, count).cluster.devices[0]
        assert (group.hosts, group.count) == (hosts, on_host)
        assert (group.speed, group.memory_bytes) == (2.0, 10**6)


def test_what_was_allowed_stays_allowed() -> None:
    """A profile of another kind of device was rescaled when asked; other numbers of such devices are too."""
    source = MadeSource(units=random_units(8, 0), tensors=(1, 2))
    links = Links(intra_host=FREE, inter_host=Link(bandwidth_bytes_per_s=100.0, latency_s=0.1))
    cluster = Cluster(devices=(DeviceGroup(kind="cuda", count=2, hosts=4, speed=8.0),), links=links)
    plan = plan_of(Mesh(tensor=2, data=4), batch=32)
    with pytest.raises(UsageError, match="use --rescale"):
        source.prepared(plan, cluster)
    prepared = source.prepared(plan, cluster, rescale=True, innermost="tensor")
    found = resize_prepared(prepared, 4)
    assert found.costs.topology.innermost == "tensor"
    assert found.costs.topology.group("tensor").num_hosts == 1
    same = prepared.changed()
    assert same.forecast().step_s == prepared.forecast().step_s
    # One that was never rescaled is not rescaled by the way.
    own = source.prepared(plan, Cluster(devices=(DeviceGroup(kind="cpu", count=8),)))
    with pytest.raises(UsageError, match="use --rescale"):
        own.changed(cluster=cluster)
