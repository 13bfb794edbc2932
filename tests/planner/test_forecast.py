"""Plan, measurements and cluster belong together, or one sentence says why not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planner.conftest import MadeSource, cluster_of, plan_of, random_units

from made_profiles import equal_units
from stagewright.cluster.cluster import FREE, Cluster, DeviceGroup
from stagewright.errors import UsageError
from stagewright.planner.forecast import prepare_plan
from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.simulate import predict
from stagewright.spec.plan import Mesh

SOURCE = MadeSource(units=random_units(8, 0), tensors=(1, 2))


def test_cuts_are_chosen_by_the_policy() -> None:
    units = MadeSource(units=equal_units(6).units)
    prepared = units.prepared(plan_of(Mesh(pipeline=3), microbatches=4), cluster_of(3, FREE))
    assert prepared.plan.cuts == ("u1", "u3")
    assert [(one.first, one.last) for one in prepared.costs.stages] == [(0, 1), (2, 3), (4, 5)]
    given = units.prepared(plan_of(Mesh(pipeline=3), microbatches=4, cuts=("u0", "u4")), cluster_of(3, FREE))
    assert given.plan.cuts == ("u0", "u4")
    # A device twice as fast gets twice as much.
    cluster = Cluster(devices=(DeviceGroup(kind="cpu", count=1, speed=2.0), DeviceGroup(kind="cpu", count=1)))
    uneven = units.prepared(plan_of(Mesh(pipeline=2), microbatches=4), cluster)
    assert uneven.plan.cuts == ("u3",)


def test_a_faster_device_takes_less() -> None:
    plan = plan_of(Mesh(data=2), batch=8)
    slow, fast = (SOURCE.prepared(plan, cluster_of(2, FREE, speed=speed)) for speed in (1.0, 4.0))
    for name in ("forward_s", "backward_input_s", "backward_weight_s"):
        before, after = (getattr(one.costs.stages[0], name) for one in (slow, fast))
        assert before == pytest.approx(4 * after)
    assert slow.costs.serial_s == pytest.approx(4 * fast.costs.serial_s)
    assert slow.costs.stages[0].saved_bytes == fast.costs.stages[0].saved_bytes


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
def test_a_batch_is_all_computed(microbatches: int) -> None:
    """However it is cut, its samples are computed once; uneven ones by their share."""
    plan = plan_of(batch=10, microbatches=microbatches)
    costs = SOURCE.prepared(plan, cluster_of(1)).costs
    once = sum(one.total_s for one in SOURCE.units)
    assert sum(costs.shares) * costs.stages[0].compute_s == pytest.approx(10 * once)
    assert costs.serial_s == pytest.approx(
        10 * (once + 0.2) + 1e-3 * sum(one.parameter_bytes.total for one in SOURCE.units)
    )


def test_cuts_that_are_not_in_order() -> None:
    """The engine refuses them, so they are not forecast either."""
    with pytest.raises(UsageError, match=r"cuts \['u4', 'u1'\] are not in the order of the model"):
        SOURCE.prepared(plan_of(Mesh(pipeline=3), microbatches=4, cuts=("u4", "u1")), cluster_of(3))


def test_refused() -> None:
    with pytest.raises(UsageError, match="cuts after 'v1', but 'made' has no such unit; its units are u0 … u7"):
        SOURCE.prepared(plan_of(Mesh(pipeline=2), microbatches=4, cuts=("v1",)), cluster_of(2))
    with pytest.raises(UsageError, match="cuts after 'u7'"):
        SOURCE.prepared(plan_of(Mesh(pipeline=2), microbatches=4, cuts=("u7",)), cluster_of(2))
    with pytest.raises(UsageError, match="measured for tensor=2, but the plan has tensor=1"):
        prepare_plan(plan_of(), SOURCE.model(8, 2), cluster_of(1))
    with pytest.raises(UsageError, match="measured on cpu:0, but the cluster has cuda devices"):
        SOURCE.prepared(plan_of(), Cluster(devices=(DeviceGroup(kind="cuda", count=1),)))
    with pytest.raises(UsageError, match="can't be split into 9 micro-batches"):
        SOURCE.prepared(plan_of(batch=8, microbatches=9), cluster_of(1))


def test_a_change_alone_is_changed() -> None:
    prepared = SOURCE.prepared(plan_of(Mesh(pipeline=2), microbatches=4), cluster_of(2))
    free = prepared.changed(cluster=cluster_of(2, FREE))
    assert free.plan == prepared.plan
    assert free.forecast().step_s < prepared.forecast().step_s
    other = prepared.changed(plan=replace(prepared.plan, schedule="gpipe"))
    assert other.cluster == prepared.cluster
    assert other.plan.cuts == prepared.plan.cuts


def test_a_tensor_degree_for_each_stage() -> None:
    """Each stage costs what it does where all have its degree; what crosses is sent to each worker behind the cut."""
    source = MadeSource(units=random_units(6, 3), tensors=(1, 2))
    base = plan_of(microbatches=4, cuts=("u2",))
    cluster = cluster_of(4)

    def costs_of(mesh: str) -> PlanCosts:
        return source.prepared(replace(base, mesh=Mesh.parse(mesh)), cluster).costs

    mixed = costs_of("tensor=2:1")
    assert [replace(stage, copies=(1, 1)) for stage in mixed.stages] == [
        costs_of("tensor=2,pipeline=2").stages[0],
        costs_of("pipeline=2").stages[1],
    ]
    assert mixed.stages[0].copies == (1, 2)
    assert costs_of("tensor=1:2").stages[0].copies == (2, 1)
    assert mixed.serial_s == costs_of("pipeline=2").serial_s
    one, three = predict(costs_of("pipeline=2")).links[0], predict(mixed).links[0]
    assert three.num_bytes == pytest.approx(1.5 * one.num_bytes)
    tensor = [use for use in predict(mixed).collectives if use.axis == "tensor"]
    assert [(use.worker, use.num_workers) for use in tensor] == [(0, 2)]


def test_cuts_count_all_workers_of_a_stage() -> None:
    """Of six equal units, two workers get four."""
    source = MadeSource(units=equal_units(6).units, tensors=(1, 2))
    plan = plan_of(Mesh.parse("tensor=2:1"), microbatches=4)
    assert source.prepared(plan, cluster_of(3)).plan.cuts == ("u3",)
