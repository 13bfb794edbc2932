"""A plan on another number of devices: other numbers of stages or replicas, with the same batch."""

from __future__ import annotations

from dataclasses import replace

from stagewright.cluster.cluster import Cluster
from stagewright.errors import UsageError
from stagewright.planner.forecast import PreparedPlan
from stagewright.schedules.rules import SCHEDULES
from stagewright.spec.plan import Plan


def resize_prepared(prepared: PreparedPlan, num_devices: int | None) -> PreparedPlan:
    """Return the plan on another number of devices, all like the first; None: as many as it can use."""
    plan = resize_plan(prepared.plan, num_devices, len(prepared.measured.profile.units))
    group = prepared.cluster.devices[0]
    on_host = max(group.count for group in prepared.cluster.devices)
    count = plan.mesh.num_workers
    hosts = -(-count // on_host) if prepared.cluster.links.inter_host is not None else 1
    devices = replace(group, count=min(count, on_host) if hosts > 1 else count, hosts=hosts)
    cluster = Cluster(devices=(devices,), links=prepared.cluster.links)
    return prepared.changed(plan=plan, cluster=cluster)


def resize_plan(plan: Plan, num_devices: int | None, num_units: int) -> Plan:
    """Change the stages of a pipeline, up to its units, or the replicas, down to one sample each."""
    mesh = plan.mesh
    if mesh.tensor_degrees:
        raise UsageError(
            f"{mesh} has a tensor degree for each stage, and other numbers of devices need other degrees: forecast a "
            "plan with those"
        )
    group_size = mesh.tensor * (1 if _is_pipeline(plan) else mesh.pipeline)
    on_worker = max(1, plan.num_stages // mesh.pipeline)
    if num_devices is None:
        largest = num_units // on_worker if _is_pipeline(plan) else plan.batch // plan.microbatches
        num_devices = group_size * max(1, largest)
    if num_devices % group_size:
        raise UsageError(
            f"{num_devices} devices can't be divided into groups of {group_size}: use a multiple of {group_size}"
        )
    size = num_devices // group_size
    if not _is_pipeline(plan):
        if plan.batch < size * plan.microbatches:
            raise UsageError(
                f"a batch of {plan.batch} in {plan.microbatches} micro-batches is enough for at most "
                f"{plan.batch // plan.microbatches} replicas, not {size}: use --devices "
                f"{plan.batch // plan.microbatches * group_size}, --infinite-devices, or a larger batch in the plan"
            )
        return replace(plan, mesh=replace(mesh, data=size), devices=(), speeds=())
    stages = size * on_worker
    if stages > num_units:
        raise UsageError(
            f"{plan.model.name} has {num_units} units and so at most {num_units} stages, not {stages}: "
            f"use --devices {num_units // on_worker * mesh.tensor}, --infinite-devices, or finer units in the plan "
            '(units = "leaf")'
        )
    minimum = SCHEDULES[plan.schedule].min_microbatches(stages, size)
    microbatches = min(max(plan.microbatches, minimum), plan.batch)
    schedule = plan.schedule if microbatches >= minimum else "gpipe"
    if SCHEDULES[schedule].rounds:
        microbatches = max(size, microbatches // size * size)
    return replace(
        plan,
        mesh=replace(mesh, pipeline=size),
        speeds=(),
        stages=None if plan.stages is None else stages,
        microbatches=microbatches,
        schedule=schedule,
        actions=(),
        cuts=(),
        devices=(),
    )


def _is_pipeline(plan: Plan) -> bool:
    return plan.mesh.pipeline > 1 and plan.mesh.data == 1
