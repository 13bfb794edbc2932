"""Profiles made of numbers, and plans over them: what tests of the forecast and of the planner share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagewright.cluster.cluster import Cluster, DeviceGroup, Links
from stagewright.profiler.profile import Amount, Profile, Time, UnitProfile
from stagewright.simulator.costs.plan_costs import PlanCosts, plan_costs
from stagewright.simulator.topology import Topology
from stagewright.spec.plan import Mesh, ModelSpec, Plan


def time(seconds: float) -> Time:
    return Time(median_s=seconds, spread_s=0.0)


def unit(name: str, forward: float, backward: tuple[float, float], **changes: Any) -> UnitProfile:
    sizes: dict[str, Any] = {
        "parameters": Amount(total=25),
        "parameter_bytes": Amount(total=100),
        "buffer_bytes": 0,
        "saved_bytes": Amount(total=1000),
        "recompute_saved_bytes": 10,
        "crossing_bytes": 10,
        "output_bytes": 10,
        "macs": 1,
    } | changes
    return UnitProfile(
        name=name,
        kind="Linear",
        block=None,
        forward=time(forward),
        backward_input=time(backward[0]),
        backward_weight=time(backward[1]),
        **sizes,
    )


def profile_of(units: Sequence[UnitProfile], *, training: bool = True, batch_size: int = 1) -> Profile:
    return Profile(
        model="made",
        device="cpu:0",
        dtype="float32",
        batch_size=batch_size,
        training=training,
        units=tuple(units),
        whole_forward=time(sum(one.forward.median_s for one in units)),
        whole_backward=time(sum(one.backward_s for one in units)),
        whole_macs=len(units),
        versions={},
    )


def equal_units(count: int, forward: float = 1.0, backward: tuple[float, float] = (1.0, 1.0), **sizes: Any) -> Profile:
    return profile_of([unit(f"u{index}", forward, backward, **sizes) for index in range(count)])


def make_costs(
    profile: Profile,
    *,
    mesh: Mesh,
    microbatches: int = 1,
    schedule: str = "1f1b",
    links: Links | None = None,
    stages: int | None = None,
    count: int | None = None,
    cluster: Cluster | None = None,
    terms: dict[str, Any] | None = None,
    **fields: Any,
) -> PlanCosts:
    """Costs of a plan that cuts the units evenly."""
    plan = Plan(
        model=ModelSpec(name="made"),
        batch=microbatches * mesh.data,
        mesh=mesh,
        microbatches=microbatches,
        schedule=schedule,  # type: ignore[arg-type]
        stages=stages,
        **fields,
    )
    num_units = len(profile.units)
    cuts = [num_units * stage // plan.num_stages - 1 for stage in range(1, plan.num_stages)]
    if cluster is None:
        group = DeviceGroup(kind="cpu", count=count or mesh.num_workers)
        cluster = Cluster(devices=(group,), links=links or Links())
    return plan_costs(
        plan, profile, Topology(mesh=mesh, cluster=cluster), cuts=cuts, sizes=[1] * microbatches, **(terms or {})
    )
