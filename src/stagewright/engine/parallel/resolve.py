"""Resolve a plan: choose its devices and cuts, so that it says all that a run needs.

The launcher does it before workers start; workers that `torchrun` starts agree on the cuts among themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from stagewright.cluster.device import Device
from stagewright.engine.batch.microbatch import shares
from stagewright.engine.parallel.replica import capture_for, cut_indices, on_device
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity
from stagewright.engine.worker.host_memory_check import check_builds
from stagewright.graph.unit_graph import UnitGraph
from stagewright.machine.machine import default_devices
from stagewright.partition.conditions import Conditions
from stagewright.partition.registry import find_policy
from stagewright.partition.split import split as split_by
from stagewright.spec.local_check import check_here
from stagewright.spec.plan import Plan
from stagewright.spec.plan_rules import check_plan
from stagewright.zoo.model import Batch, Model

__all__ = ["agreed_cuts", "check_cuts", "resolve_plan"]


def resolve_plan(plan: Plan, progress: Callable[[int, int, str], None] | None = None) -> Plan:
    """The plan with devices and cuts, able to run here; measures the model where the split's policy needs times."""
    if not plan.devices:
        plan = replace(plan, devices=default_devices(plan.mesh.num_workers))
    check_plan(plan)
    check_here(plan)
    if plan.cuts or plan.num_stages == 1:
        return plan
    find_policy(plan.split)
    check_builds(plan.model, plan.mesh.num_workers)
    model = plan.model.load(batch=_microbatch_size(plan), dtype=plan.dtype)
    model.module.train(plan.training)
    device = Device.parse(plan.devices[0])
    model = model.to(device.torch_device(), plan.memory_bytes)
    graph = capture_for(plan, model)
    cuts = _cuts(plan, graph, Batch(args=model.args, kwargs=model.kwargs), device, progress)
    del model, graph
    device.give_back()  # workers need the room
    return replace(plan, cuts=cuts)


def check_cuts(plan: Plan) -> None:
    """UsageError where the model has not the units or the cuts that the plan names; builds and captures the model."""
    model = plan.model.load(batch=_microbatch_size(plan), dtype=plan.dtype)
    model.module.train(plan.training)
    cut_indices(capture_for(plan, model), plan.cuts)


def agreed_cuts(plan: Plan, model: Model, graph: UnitGraph, context: WorkerContext) -> tuple[str, ...]:
    """The cuts of a plan that workers run without having resolved it: worker 0 finds them, all follow."""
    chosen = torch.zeros(plan.num_stages - 1, dtype=torch.int64, device=context.torch_device)
    if context.rank == 0:
        batch = Batch(args=model.args, kwargs=model.kwargs)
        if graph.dynamic:
            batch = on_device(model.example(_microbatch_size(plan)), context.torch_device)
        names = _cuts(plan, graph, batch, context.device, lambda done, total, unit: activity.begin(f"profile {unit}"))
        chosen.copy_(torch.tensor(cut_indices(graph, names)))
    if plan.mesh.num_workers > 1:
        dist.broadcast(chosen, src=0)
    return tuple(graph.calls[cut].name for cut in chosen.tolist())


def _cuts(
    plan: Plan, graph: UnitGraph, batch: Batch, device: Device, progress: Callable[[int, int, str], None] | None
) -> tuple[str, ...]:
    """Where the plan's policy cuts, with the model measured on a device."""
    from stagewright.profiler.measure import profile as measure

    measured = measure(
        graph,
        batch.args,
        batch.kwargs,
        name=plan.model.name,
        device=device,
        training=plan.training,
        progress=progress,
    )
    conditions = Conditions(num_microbatches=plan.microbatches, recompute=plan.recompute != "none")
    return split_by(measured, plan.num_stages, plan.split, conditions).cut_names


def _microbatch_size(plan: Plan) -> int:
    return max(1, max(shares(plan.batch, plan.mesh.data)) // plan.microbatches)
