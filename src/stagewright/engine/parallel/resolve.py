"""Complete a plan: choose the devices, cuts and codecs that it leaves open.

The launcher resolves devices and cuts before workers start (``resolve_plan``). Workers finalize a plan among themselves
(``finalize_plan``): speeds that are to be measured, cuts that follow them or that ``torchrun`` left open, and codecs
set to ``auto``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from stagewright.cluster.device import Device
from stagewright.engine.batch.precision import torch_autocast_dtype
from stagewright.engine.parallel.codec_choice import choose_codecs
from stagewright.engine.parallel.compilation import choose_compile_mode
from stagewright.engine.parallel.model import capture_for, check_recomputation, cut_indices, move_batch
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity
from stagewright.graph.unit_graph import UnitGraph
from stagewright.machine.machine import default_devices
from stagewright.partition.conditions import Conditions
from stagewright.partition.registry import find_policy
from stagewright.partition.split import split as split_by
from stagewright.profiler.profile import Profile
from stagewright.spec.activation_checkpointing import (
    block_ends,
    checkpoint_by_block,
    checkpoints_by_block,
    recomputes_stages,
)
from stagewright.spec.host_memory_check import check_host_memory, choose_baseline, num_parts
from stagewright.spec.local_check import check_on_this_machine
from stagewright.spec.plan import Compile, Plan
from stagewright.spec.plan_rules import check_plan
from stagewright.spec.searched_order import require_order
from stagewright.spec.unequal_devices import MEASURED, pipeline_speeds, relative_speeds, replica_sizes
from stagewright.zoo.model import Batch, Model


def resolve_plan(plan: Plan, progress: Callable[[int, int, str], None] | None = None) -> Plan:
    """Choose devices and cuts, and check that the plan can run here; profile the model if the split policy needs it."""
    if not plan.devices:
        plan = replace(plan, devices=default_devices(plan.mesh.num_workers))
    check_plan(plan)
    require_order(plan)
    check_on_this_machine(plan)
    plan = choose_baseline(plan)
    check_host_memory(plan.model, plan.mesh.num_workers, num_parts(plan))
    if plan.cuts or (plan.num_stages == 1 and not checkpoints_by_block(plan)):
        return plan
    find_policy(plan.split)
    if plan.speeds == MEASURED and not checkpoints_by_block(plan):
        return plan  # the workers cut it, each on its own device
    model = plan.model.load(batch=_microbatch_size(plan), dtype=plan.dtype, hollow=True)
    model.module.train(plan.training)
    device = Device.parse(plan.devices[0])
    model = model.to(device.torch_device(), plan.memory_bytes)
    graph = capture_for(plan, model)
    if checkpoints_by_block(plan):
        plan = checkpoint_by_block(plan, block_ends(graph.calls))
    else:
        mode, _ = choose_compile_mode(plan, model, graph, device.torch_device())
        profile = _profile(plan, graph, Batch(args=model.args, kwargs=model.kwargs), device, mode, progress)
        plan = replace(plan, cuts=_choose_cuts(plan, profile))
    del model, graph
    device.release_memory()  # workers need the memory
    return plan


def check_worker_plan(plan: Plan, device: str, num_local: int) -> None:
    """Refuse what this machine lacks, and a model that its ``num_local`` workers can't hold."""
    check_on_this_machine(replace(plan, devices=(device,)))
    check_host_memory(plan.model, num_local, num_parts(plan))


def finalize_plan(
    plan: Plan,
    model: Model,
    graph: UnitGraph,
    context: WorkerContext,
    *,
    write_plan: Callable[[Plan], object] | None = None,
) -> Plan:
    """Choose what a plan leaves open: speeds, cuts, codecs. Every worker must call this, and all get the same plan.

    Worker 0 calls ``write_plan`` if anything was chosen.
    """
    require_order(plan)
    final = checkpoint_by_block(plan, block_ends(graph.calls)) if checkpoints_by_block(plan) else plan
    profile = None
    if plan.speeds == MEASURED:
        profile = _profile_here(plan, model, graph, context) if plan.mesh.num_workers > 1 else None
        final = replace(final, speeds=_agree_on_speeds(profile, context) if profile else ())
    if not final.cuts and plan.num_stages > 1:
        activity.begin("split")
        final = replace(final, cuts=_agree_on_cuts(final, model, graph, context, profile))
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    final = choose_codecs(final, model, graph, context, batch)
    if final != plan:
        check_plan(final)
        if write_plan is not None and context.rank == 0:
            write_plan(final)
    return final


def check_cuts(plan: Plan) -> None:
    """Raise UsageError if the model lacks the units or cuts that the plan names; builds and captures the model."""
    model = plan.model.load(batch=_microbatch_size(plan), dtype=plan.dtype, hollow=True)
    model.module.train(plan.training)
    graph = capture_for(plan, model)
    cut_indices(graph, plan.cuts)
    check_recomputation(plan, graph)


def _agree_on_speeds(profile: Profile, context: WorkerContext) -> tuple[float, ...]:
    """Compare the times of one profile on all devices; (): they differ too little to matter."""
    seconds = sum(unit.total_s for unit in profile.units)
    mine = torch.tensor([seconds], dtype=torch.float64, device=context.torch_device)
    times = [torch.zeros_like(mine) for _ in range(context.mesh.num_workers)]
    dist.all_gather(times, mine)
    return relative_speeds([1 / float(time) for time in times])


def _agree_on_cuts(
    plan: Plan, model: Model, graph: UnitGraph, context: WorkerContext, profile: Profile | None
) -> tuple[str, ...]:
    """Choose the cuts on worker 0 and broadcast them."""
    indices = torch.zeros(plan.num_stages - 1, dtype=torch.int64, device=context.torch_device)
    if context.rank == 0:
        names = _choose_cuts(plan, profile or _profile_here(plan, model, graph, context))
        indices.copy_(torch.tensor(cut_indices(graph, names)))
    if plan.mesh.num_workers > 1:
        dist.broadcast(indices, src=0)
    return tuple(graph.calls[index].name for index in indices.tolist())


def _profile_here(plan: Plan, model: Model, graph: UnitGraph, context: WorkerContext) -> Profile:
    """Profile the whole model on this worker's device."""
    batch = Batch(args=model.args, kwargs=model.kwargs)
    if graph.dynamic:
        batch = move_batch(model.example(_microbatch_size(plan)), context.torch_device)
    mode, _ = choose_compile_mode(plan, model, graph, context.torch_device)
    return _profile(
        plan, graph, batch, context.device, mode, lambda done, total, unit: activity.begin(f"profile {unit}")
    )


def _profile(
    plan: Plan,
    graph: UnitGraph,
    batch: Batch,
    device: Device,
    mode: Compile,
    progress: Callable[[int, int, str], None] | None,
) -> Profile:
    """Profile the model on a device, as the plan runs it."""
    from stagewright.profiler.measure import profile as measure_profile

    return measure_profile(
        graph,
        batch.args,
        batch.kwargs,
        name=plan.model.name,
        device=device,
        training=plan.training,
        compile=mode,
        autocast=torch_autocast_dtype(plan),
        progress=progress,
    )


def _choose_cuts(plan: Plan, profile: Profile) -> tuple[str, ...]:
    """Return the cuts of the plan's split policy; those by time follow the speeds of the devices."""
    speeds = pipeline_speeds(plan)
    conditions = Conditions(
        num_microbatches=plan.microbatches,
        recompute=recomputes_stages(plan),
        speeds=tuple(speeds[worker] for worker in plan.stage_workers) if speeds else None,
    )
    return split_by(profile, plan.num_stages, plan.split, conditions).cut_names


def _microbatch_size(plan: Plan) -> int:
    return max(1, max(replica_sizes(plan, plan.batch)) // plan.microbatches)
