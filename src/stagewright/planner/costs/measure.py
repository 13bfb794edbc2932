"""Measurement of a model's costs on this machine: its units, loss and optimizer.

load at the micro-batch size ─► capture ─► (shard as one tensor parallel worker) ─► profile ─► loss, optimizer
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stagewright.cluster.device import Device
from stagewright.engine.batch.microbatch import microbatch_sizes
from stagewright.engine.batch.precision import autocast_of, torch_autocast_dtype
from stagewright.engine.expert.apply import plan_expert_parallel
from stagewright.engine.parallel.compilation import check_recordable, choose_compile_mode
from stagewright.engine.parallel.model import capture_for
from stagewright.engine.tensor.apply import plan_tensor_parallel
from stagewright.engine.weight_gradients.in_products import separate_share
from stagewright.errors import UsageError
from stagewright.graph.preserve import preserved
from stagewright.graph.unit_graph import UnitGraph
from stagewright.machine import cpu_offload
from stagewright.machine.machine import default_devices
from stagewright.planner.costs.expert_traffic import record_expert_traffic
from stagewright.planner.costs.graphed_times import scale_to_graphs
from stagewright.planner.costs.overheads_cache import CachedOverheads, OverheadsCache
from stagewright.planner.costs.split_backward import measure_split_backward, whole_backward_cost
from stagewright.planner.costs.tensor_shard import record_traffic, shard_alone
from stagewright.planner.costs.training_overheads import measure_training_overheads, workspace_bytes
from stagewright.profiler.identity import profile_key
from stagewright.profiler.measure import profile as measure_units
from stagewright.profiler.profile import Profile
from stagewright.schedules.rules import SCHEDULES
from stagewright.simulator.costs.expert_traffic import ExpertTraffic
from stagewright.simulator.costs.overheads import ModelOverheads
from stagewright.simulator.costs.tensor_traffic import TensorTraffic
from stagewright.spec.plan import Compile, Plan
from stagewright.spec.unequal_devices import replica_sizes
from stagewright.zoo.model import Model

Progress = Callable[[int, int, str], None]
REPEATS = 5  # default measurement rounds, so that all commands share a cached profile


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """Costs of one micro-batch of a model on one device."""

    profile: Profile
    overheads: ModelOverheads
    tensor: tuple[TensorTraffic, ...] | None = None
    """Tensor collectives of its units; None without tensor parallelism."""
    num_tensor: int = 1
    """Tensor parallel size; the largest, with a degree for each stage."""
    other_degrees: tuple[ModelCosts, ...] = ()
    """With a tensor degree for each stage, the costs at the other degrees."""
    whole: Profile | None = None
    """With tensor parallelism, the profile of the unsplit layers, for the single-device baseline."""
    experts: tuple[ExpertTraffic, ...] | None = None
    """Experts of its units; None if the model has none that could be divided."""

    @property
    def num_experts(self) -> int:
        """Experts of each layer, or their greatest common divisor; 1 without."""
        return math.gcd(*(unit.num_experts for unit in self.experts or ())) or 1

    @property
    def expert_bytes(self) -> int:
        """Parameters of all experts."""
        return sum(unit.parameter_bytes for unit in self.experts or ())


def plan_microbatch_sizes(plan: Plan) -> tuple[int, ...]:
    """Return the samples of each micro-batch of the largest replica."""
    return microbatch_sizes(max(replica_sizes(plan, plan.batch)), plan.microbatches)


def measure_model(
    plan: Plan,
    *,
    size: int | None = None,
    cache: str | Path | bool = True,
    repeats: int = REPEATS,
    fresh: bool = False,
    progress: Progress | None = None,
) -> ModelCosts:
    """Measure the plan's model on the plan's first device, at `size` or that of its largest micro-batch.

    Cached results are reused unless `fresh`. With a tensor degree for each stage, it is measured at each degree.
    """
    if plan.mesh.tensor_degrees:
        measured = [
            measure_model(one, size=size, cache=cache, repeats=repeats, fresh=fresh, progress=progress)
            for one in plans_by_degree(plan)
        ]
        return with_degrees(measured)
    device = Device.parse(plan.devices[0] if plan.devices else default_devices(1)[0])
    try:
        return _measure(plan, device, size, cache, repeats, fresh, progress)
    finally:
        device.release_memory()


def plans_by_degree(plan: Plan) -> list[Plan]:
    """Return the plan with each of its tensor degrees for all stages, the largest first."""
    mesh = plan.mesh
    degrees = sorted(set(mesh.tensor_degrees), reverse=True) or [mesh.tensor]
    return [replace(plan, mesh=replace(mesh, tensor=degree, tensor_degrees=())) for degree in degrees]


def with_degrees(measured: Sequence[ModelCosts]) -> ModelCosts:
    """Join the costs of a model at several tensor degrees, the largest first."""
    return replace(measured[0], other_degrees=tuple(measured[1:]))


def _measure(
    plan: Plan,
    device: Device,
    size: int | None,
    cache: str | Path | bool,
    repeats: int,
    fresh: bool,
    progress: Progress | None,
) -> ModelCosts:
    model, graph = load_captured(plan, device, size)
    mode, _ = choose_compile_mode(plan, model, graph, device.torch_device())

    def measure_profile(part: str, progress: Progress | None) -> Profile:
        return measure_units(
            graph,
            model.args,
            model.kwargs,
            name=plan.model.name,
            device=device,
            repeats=repeats,
            training=plan.training,
            cache=cache,
            fresh=fresh,
            part=part,
            compile=mode,
            autocast=torch_autocast_dtype(plan),
            progress=progress,
        )

    with preserved(graph.model), cpu_offload.offloaded(graph.model, device.torch_device()):
        experts = record_expert_traffic(graph, model.args, model.kwargs)
    if plan.mesh.context > 1:
        raise UsageError(
            f"context = {plan.mesh.context} can't be forecast from measurements of one device: use --analytic"
        )
    if plan.mesh.expert > 1:
        plan_expert_parallel(graph.model, plan.mesh.expert)  # raises before anything is measured
    tensor, whole, part = None, None, "whole layers"
    if plan.mesh.tensor > 1:
        # Raises before anything is measured.
        plan_tensor_parallel(graph.model, plan.mesh.tensor, vocab_parallel=plan.vocab_parallel)
        whole, part = measure_profile(part, None), f"one of {plan.mesh.tensor} workers"
        part += " with a divided vocabulary" if plan.vocab_parallel else ""
        part += " with a divided sequence" if plan.sequence_parallel else ""
        tensor = _shard(plan, model, graph, device, mode)
    profile = measure_profile(part, progress)
    target = device.torch_device()
    if plan.cuda_graphs:
        check_recordable(plan, model, graph, target)
    if plan.training:
        # A size is given when many plans are compared, with any schedule.
        split = size is not None or SCHEDULES[plan.schedule].splits_backward
        overheads = _load_or_measure_overheads(
            plan, model, graph, profile, device, part=part, mode=mode, split=split, cache=cache, repeats=repeats
        )
        share = 0.0 if plan.cuda_graphs else separate_share(plan, graph.model, target)  # part of the backward graph
        overheads = dataclasses.replace(overheads, accumulate_s_per_byte=share * overheads.accumulate_s_per_byte)
    else:
        with device.pinned():
            overheads = ModelOverheads(workspace_bytes=workspace_bytes(device.torch_device()))
    if plan.cuda_graphs:
        profile = scale_to_graphs(profile, plan, model, graph, target, mode, repeats)
    return ModelCosts(
        profile=profile, overheads=overheads, tensor=tensor, num_tensor=plan.mesh.tensor, whole=whole, experts=experts
    )


def _shard(plan: Plan, model: Model, graph: UnitGraph, device: Device, mode: Compile) -> tuple[TensorTraffic, ...]:
    """Shard the model's layers in place as one tensor parallel worker; return the units' collectives."""
    axis = shard_alone(
        graph,
        plan.mesh.tensor,
        vocab_parallel=plan.vocab_parallel,
        sequence_parallel=plan.sequence_parallel,
        gather_logits=mode != "none",
    )
    loss = (lambda output: model.loss(output, model.target)) if plan.training else None
    target = device.torch_device()
    with preserved(graph.model), cpu_offload.offloaded(graph.model, target), autocast_of(plan, target):
        traffic = record_traffic(graph, axis, model.args, model.kwargs, loss)
    if len(traffic) != len(graph.calls):
        raise UsageError(f"{plan.model.name} calls units inside units: its tensor parallelism can't be forecast")
    return traffic


def _load_or_measure_overheads(
    plan: Plan,
    model: Model,
    graph: UnitGraph,
    profile: Profile,
    device: Device,
    *,
    part: str,
    mode: Compile,
    split: bool,
    cache: str | Path | bool,
    repeats: int,
) -> ModelOverheads:
    """Return the overheads of training, cached or measured; ``split``: including those of a split backward."""
    store = OverheadsCache(None if cache is True else Path(cache)) if cache is not False else None
    key: dict[str, str] = {}
    cached: CachedOverheads | None = None
    if store is not None:
        name, loss = plan.model.name, getattr(model.loss, "__qualname__", type(model.loss).__qualname__)
        key = profile_key(
            graph,
            model.args,
            model.kwargs,
            name=name,
            device=device,
            repeats=repeats,
            training=True,
            part=part,
            compile=mode,
            autocast=torch_autocast_dtype(plan),
        )
        key |= {"optimizer": repr(plan.optimizer), "loss": f"{model.loss.__module__}.{loss}"}
        # Overheads cached with an older profile do not match newly measured units.
        cached = store.load_overheads(key) if profile.source == "cache" else None
    torch_device = device.torch_device()
    with device.pinned(), preserved(graph.model), autocast_of(plan, torch_device):
        known = cached
        if known is None:
            measured = measure_training_overheads(graph, model, plan, repeats, torch_device)
            known = CachedOverheads(overheads=measured, has_split=False)
        # An offloaded model is never on the device as a whole, so its backward can't be split there.
        if split and not known.has_split and not cpu_offload.is_offloaded(graph.model, torch_device):
            cost = (
                measure_split_backward(graph, model, profile, repeats)
                if plan.compile == "none"
                else whole_backward_cost(profile)
            )
            overheads = dataclasses.replace(
                known.overheads, split_input=cost.inputs, split_weight=cost.weights, split_held_share=cost.held_share
            )
            known = CachedOverheads(overheads=overheads, has_split=True)
    if store is not None and known != cached:
        store.save_overheads(key, known)
    return known.overheads


def load_captured(plan: Plan, device: Device, size: int | None = None) -> tuple[Model, UnitGraph]:
    """Load and capture the plan's model on a device, at `size` or that of its largest micro-batch."""
    model = plan.model.load(batch=size or max(plan_microbatch_sizes(plan)), dtype=plan.dtype)
    model.module.train(plan.training)
    model = model.to(device.torch_device(), plan.memory_bytes)
    return model, capture_for(plan, model)


def cut_indices(profile: Profile, names: Sequence[str]) -> list[int]:
    """Return the unit indices of a plan's cuts; raise UsageError if they belong to another model."""
    known = {unit.name: index for index, unit in enumerate(profile.units[:-1])}
    for name in names:
        if name not in known:
            raise UsageError(
                f"the plan cuts after {name!r}, but {profile.model!r} has no such unit; its units are "
                f"{profile.units[0].name} … {profile.units[-1].name}: is it a plan for another model?"
            )
    indices = [known[name] for name in names]
    if indices != sorted(set(indices)):
        raise UsageError(f"cuts {list(names)} are not in the order of the model")
    return indices
