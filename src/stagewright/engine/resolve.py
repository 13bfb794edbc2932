"""Resolve a plan: choose its devices and cuts, so that it says all that a run needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stagewright.cluster.device import Device
from stagewright.cluster.machine import default_devices
from stagewright.engine.microbatch import shares
from stagewright.engine.replica import capture_for
from stagewright.plan.check import check_plan
from stagewright.plan.value import Plan
from stagewright.split.compare import split as split_by
from stagewright.split.conditions import Conditions
from stagewright.split.registry import find_policy

__all__ = ["resolve_plan"]


def resolve_plan(plan: Plan, progress: Callable[[int, int, str], None] | None = None) -> Plan:
    """The plan with devices and cuts; measures the model where the split's policy needs times."""
    if not plan.devices:
        plan = replace(plan, devices=default_devices(plan.mesh.num_workers))
    check_plan(plan)
    if plan.cuts or plan.num_stages == 1:
        return plan
    from stagewright.profile.measure import profile as measure

    find_policy(plan.split)
    size = max(1, max(shares(plan.batch, plan.mesh.data)) // plan.microbatches)
    model = plan.model.load(batch=size, dtype=plan.dtype)
    model.module.train(plan.training)
    device = Device.parse(plan.devices[0])
    graph = capture_for(plan, model)
    measured = measure(
        graph, model.args, model.kwargs, name=plan.model.name, device=device, training=plan.training, progress=progress
    )
    conditions = Conditions(num_microbatches=plan.microbatches, recompute=plan.recompute != "none")
    chosen = split_by(measured, plan.num_stages, plan.split, conditions)
    return replace(plan, cuts=chosen.cut_names)
