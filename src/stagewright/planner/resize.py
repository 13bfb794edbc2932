"""A plan on more or fewer devices: as many stages, or as many replicas, with the same batch."""

from __future__ import annotations

from dataclasses import replace

from stagewright.cluster.cluster import Cluster
from stagewright.errors import UsageError
from stagewright.planner.forecast import PreparedPlan
from stagewright.schedules.catalog import SCHEDULES
from stagewright.spec.plan import Mesh, Plan

__all__ = ["resize_prepared", "resize_plan"]


def resize_prepared(prepared: PreparedPlan, num_devices: int | None) -> PreparedPlan:
    """The same on another number of devices, all like the first; None: as many as can be of use."""
    plan = resize_plan(prepared.plan, num_devices, len(prepared.measured.profile.units))
    group = prepared.cluster.devices[0]
    on_host = max(one.count for one in prepared.cluster.devices)
    count = plan.mesh.num_workers
    hosts = -(-count // on_host) if prepared.cluster.links.inter_host is not None else 1
    alike = replace(group, count=min(count, on_host) if hosts > 1 else count, hosts=hosts)
    cluster = Cluster(devices=(alike,), links=prepared.cluster.links)
    return prepared.changed(plan=plan, cluster=cluster)


def resize_plan(plan: Plan, num_devices: int | None, num_units: int) -> Plan:
    """A pipeline gets more stages, up to its units; replicas get fewer samples each, down to one."""
    mesh = plan.mesh
    each = mesh.tensor * (1 if _is_pipeline(plan) else mesh.pipeline)
    on_worker = max(1, plan.num_stages // mesh.pipeline)
    if num_devices is None:
        most = num_units // on_worker if _is_pipeline(plan) else plan.batch // plan.microbatches
        num_devices = each * max(1, most)
    if num_devices % each:
        raise UsageError(f"{num_devices} devices can't be shared by groups of {each}: use a multiple of {each}")
    along = num_devices // each
    if not _is_pipeline(plan):
        if plan.batch < along * plan.microbatches:
            raise UsageError(
                f"a batch of {plan.batch} in {plan.microbatches} micro-batches gives work to at most "
                f"{plan.batch // plan.microbatches} replicas, not {along}: use --devices "
                f"{plan.batch // plan.microbatches * each}, --infinite-devices, or a larger batch in the plan"
            )
        return replace(plan, mesh=replace(mesh, data=along), devices=())
    stages = along * on_worker
    if stages > num_units:
        raise UsageError(
            f"{plan.model.name} has {num_units} units and so at most {num_units} stages, not {stages}: "
            f"use --devices {num_units // on_worker * mesh.tensor}, --infinite-devices, or finer units in the plan "
            '(units = "leaf")'
        )
    least = SCHEDULES[plan.schedule].min_microbatches(stages, along)
    chunks = min(max(plan.microbatches, least), plan.batch)
    schedule = plan.schedule if chunks >= least else "gpipe"
    rounds = SCHEDULES[schedule].rounds
    chunks = max(along, chunks // along * along) if rounds else chunks
    return replace(
        plan,
        mesh=Mesh(data=mesh.data, tensor=mesh.tensor, pipeline=along),
        stages=None if plan.stages is None else stages,
        microbatches=chunks,
        schedule=schedule,
        cuts=(),
        devices=(),
    )


def _is_pipeline(plan: Plan) -> bool:
    return plan.mesh.pipeline > 1 and plan.mesh.data == 1
