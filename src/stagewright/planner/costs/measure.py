"""Measure what a forecast needs of a model on this machine: its units, its loss, its optimiser.

load at the micro-batch's size ─► capture ─► (split as one worker of a tensor axis) ─► profile ─► loss, optimiser
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stagewright.cluster.device import Device
from stagewright.engine.batch.batch_norm import find_tracked_norms
from stagewright.engine.batch.microbatch import microbatch_sizes, split_sizes
from stagewright.engine.data.data_parallel import DataParallelReplica
from stagewright.engine.jobs.measure import make_optimizer
from stagewright.engine.parallel.replica import capture_for
from stagewright.engine.tensor.apply import plan_tensor_parallel
from stagewright.errors import UsageError
from stagewright.graph.preserve import preserved
from stagewright.graph.unit_graph import UnitGraph
from stagewright.machine import cpu_offload as hosted
from stagewright.machine.machine import default_devices
from stagewright.planner.costs.overheads_cache import CachedOverheads, OverheadsCache
from stagewright.planner.costs.split_backward import measure_split_backward
from stagewright.planner.costs.tensor_shard import shard_alone, record_traffic
from stagewright.profiler.identity import profile_key
from stagewright.profiler.measure import profile as measure_units
from stagewright.profiler.profile import Profile
from stagewright.profiler.replay import peak_memory_increase
from stagewright.profiler.storage import model_storages, storage_of
from stagewright.schedules.catalog import SCHEDULES
from stagewright.simulator.costs.tensor_traffic import TensorTraffic
from stagewright.simulator.costs.overheads import ModelOverheads
from stagewright.spec.plan import Plan
from stagewright.zoo.model import Model

__all__ = ["REPEATS", "ModelCosts", "plan_microbatch_sizes", "load_captured", "measure_model"]

Progress = Callable[[int, int, str], None]
REPEATS = 5  # rounds of measuring, wherever no other number is asked for: so that all take the same profile


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """What one device was measured to take for one micro-batch of a model."""

    profile: Profile
    """Its units."""
    terms: ModelOverheads
    """Its loss and optimiser."""
    tensor: tuple[TensorTraffic, ...] | None = None
    """What its units hand to the tensor axis; None: layers are whole."""
    num_tensor: int = 1
    """Workers that share its layers."""
    whole: Profile | None = None
    """Its units with whole layers, where they are shared: what serial is made of."""


def plan_microbatch_sizes(plan: Plan) -> tuple[int, ...]:
    """Samples of each micro-batch of the replica with most."""
    return microbatch_sizes(max(split_sizes(plan.batch, plan.mesh.data)), plan.microbatches)


def measure_model(
    plan: Plan,
    *,
    size: int | None = None,
    cache: str | Path | bool = True,
    repeats: int = REPEATS,
    fresh: bool = False,
    progress: Progress | None = None,
) -> ModelCosts:
    """Measure the plan's model at the size of its largest micro-batch, on the plan's first device.

    What the cache has is taken from there, unless it is to be `fresh`.
    """
    device = Device.parse(plan.devices[0] if plan.devices else default_devices(1)[0])
    try:
        return _measure(plan, device, size, cache, repeats, fresh, progress)
    finally:
        device.give_back()


def _measure(
    plan: Plan,
    device: Device,
    size: int | None,
    cache: str | Path | bool,
    repeats: int,
    fresh: bool,
    progress: Progress | None,
) -> ModelCosts:
    tensor, whole = None, None
    place = device.torch_device()
    model, graph = load_captured(plan, device, size)

    def measured(progress: Progress | None, part: str = "whole layers") -> Profile:
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
            progress=progress,
        )

    part = "whole layers"
    if plan.mesh.tensor > 1:
        plan_tensor_parallel(graph.model, plan.mesh.tensor)  # refuses before anything is measured
        whole, part = measured(None), f"one of {plan.mesh.tensor} workers"
        axis = shard_alone(graph, plan.mesh.tensor)
        with preserved(graph.model), hosted.visiting(graph.model, place):
            tensor = record_traffic(graph, axis, model.args, model.kwargs)
        if len(tensor) != len(graph.calls):
            raise UsageError(f"{plan.model.name} calls units inside units: its tensor axis can't be forecast")
    profile = measured(progress, part)
    if not plan.training:
        with device.pinned():
            terms = ModelOverheads(workspace_bytes=_workspace_bytes(place))
        return ModelCosts(profile=profile, terms=terms, tensor=tensor, num_tensor=plan.mesh.tensor, whole=whole)
    # A size is given by who asks for many plans, of any schedule.
    halves = size is not None or SCHEDULES[plan.schedule].splits_backward
    terms = _terms_of(plan, model, graph, profile, device, part=part, halves=halves, cache=cache, repeats=repeats)
    return ModelCosts(profile=profile, terms=terms, tensor=tensor, num_tensor=plan.mesh.tensor, whole=whole)


def _terms_of(
    plan: Plan,
    model: Model,
    graph: UnitGraph,
    profile: Profile,
    device: Device,
    *,
    part: str,
    halves: bool,
    cache: str | Path | bool,
    repeats: int,
) -> ModelOverheads:
    """What training costs beside the profile's units, measured or kept; ``halves``: also of a split backward."""
    name, place = plan.model.name, device.torch_device()
    store = OverheadsCache(None if cache is True else Path(cache)) if cache is not False else None
    key: dict[str, str] = {}
    kept: CachedOverheads | None = None
    if store is not None:
        key = profile_key(
            graph, model.args, model.kwargs, name=name, device=device, repeats=repeats, training=True, part=part
        )
        loss = getattr(model.loss, "__qualname__", type(model.loss).__qualname__)
        key |= {"optimizer": repr(plan.optimizer), "loss": f"{model.loss.__module__}.{loss}"}
        # Terms of a profile that is no longer there are not of these units.
        kept = store.terms(key) if profile.source == "cache" else None
    with device.pinned(), preserved(graph.model):
        known = kept or CachedOverheads(terms=_terms(graph, model, plan, repeats, place), halves=False)
        if halves and not known.halves and not hosted.is_hosted(graph.model, place):  # which is never there as a whole
            found = measure_split_backward(graph, model, profile, repeats)
            terms = dataclasses.replace(
                known.terms,
                split_input=found.inputs,
                split_weight=found.weights,
                split_held_share=found.held_share,
            )
            known = CachedOverheads(terms=terms, halves=True)
    if store is not None and known != kept:
        store.save_terms(key, known)
    return known.terms


def load_captured(plan: Plan, device: Device, size: int | None = None) -> tuple[Model, UnitGraph]:
    """The plan's model on a device, at that size or that of its largest micro-batch, and its graph."""
    model = plan.model.load(batch=size or max(plan_microbatch_sizes(plan)), dtype=plan.dtype)
    model.module.train(plan.training)
    model = model.to(device.torch_device(), plan.memory_bytes)
    return model, capture_for(plan, model)


def _terms(graph: UnitGraph, model: Model, plan: Plan, repeats: int, place: torch.device) -> ModelOverheads:
    """Loss, optimiser and adding up of gradients, each the median of some rounds."""
    parameters = _trained(model.module, place, plan.memory_bytes)
    num_bytes = sum(one.numel() * one.element_size() for one in parameters)
    with torch.no_grad(), hosted.visiting(model.module, place):
        result = graph(*model.args, **model.kwargs)
    loss_forward, loss_backward, kept = _loss(model, result, repeats)
    loss_working = _loss_working(model, result) if place.type == "cuda" else (0, 0)
    del result

    def begin() -> None:
        for one in parameters:
            one.grad = torch.zeros_like(one)

    begin()
    accumulate = statistics.median([_adding_s(parameters) for _ in range(repeats + 1)][1:])
    optimizer = make_optimizer(dataclasses.replace(plan.optimizer, learning_rate=1e-12), parameters)

    def step() -> None:
        optimizer.step()
        for one in model.module.parameters():  # as an engine's step begins: it walks through all modules
            one.grad = None

    steps = []
    for _ in range(repeats + 1):
        begin()
        steps.append(_seconds(step, place))
    working = 0
    if place.type == "cuda":
        begin()
        working = peak_memory_increase(optimizer.step, place)[1]
    for one in parameters:
        one.grad = None
    replica = _LoneReplica(model.module)
    averages = [_seconds(lambda: replica.synchronize(1.0), place) for _ in range(repeats + 1)]
    return ModelOverheads(
        loss_forward_s=loss_forward,
        loss_backward_s=loss_backward,
        loss_kept_bytes=kept,
        optimizer_s_per_byte=statistics.median(steps[1:]) / num_bytes,
        accumulate_s_per_byte=accumulate / num_bytes,
        loss_forward_working_bytes=loss_working[0],
        loss_backward_working_bytes=loss_working[1],
        optimizer_working_share=working / num_bytes,
        workspace_bytes=_workspace_bytes(place),
        statistics_s=statistics.median(averages[1:]) if replica.summed_bytes else 0.0,
        statistics_bytes=replica.summed_bytes,
    )


def _trained(module: torch.nn.Module, place: torch.device, limit_bytes: int | None) -> list[torch.nn.Parameter]:
    """The parameters to be trained, on a device; of a model that does not fit there, copies of so many as do.

    A step and the adding up of gradients are counted by the byte.
    """
    every = [one for one in module.parameters() if one.requires_grad]
    if not hosted.is_hosted(module, place):
        return every
    left = hosted.room_of(place, limit_bytes) // (2 * hosted.ROOM)  # with gradients, states and what a step takes
    taken: list[torch.nn.Parameter] = []
    for one in every:
        num_bytes = one.numel() * one.element_size()
        if num_bytes <= left:
            taken.append(one)
            left -= num_bytes
    taken = taken or [min(every, key=torch.Tensor.numel)]
    return [torch.nn.Parameter(one.detach().to(place)) for one in taken]


class _LoneReplica(DataParallelReplica):
    """A replica that has no others: it averages batch norm's running statistics with nobody's."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.summed_bytes = module, 0
        self._norms = find_tracked_norms(module)

    def _all_reduce(self, flat: torch.Tensor) -> torch.Tensor:
        self.summed_bytes = flat.numel() * flat.element_size()
        return flat


def _loss_working(model: Model, result: Any) -> tuple[int, int]:
    """How far memory rises above the start of the loss, and of its backward pass, on CUDA."""
    leaves, inputs = _leaves(result)
    place = inputs[0].device
    with torch.enable_grad():
        found, forward = peak_memory_increase(lambda: model.loss(leaves, model.target), place)
        if not found.requires_grad:
            return forward, 0
        _, backward = peak_memory_increase(lambda: torch.autograd.grad(found, inputs, allow_unused=True), place)
    return forward, backward


def _leaves(result: Any) -> tuple[Any, list[torch.Tensor]]:
    """The result as the loss takes it, cut off from the model, and the tensors in it that get gradients."""
    leaves = pytree.tree_map_only(
        torch.Tensor, lambda leaf: leaf.detach().requires_grad_(leaf.is_floating_point()), result
    )
    return leaves, [one for one in pytree.tree_leaves(leaves) if isinstance(one, torch.Tensor) and one.requires_grad]


def _workspace_bytes(place: torch.device) -> int:
    """What matrix libraries have taken for themselves; they take it again when they need it."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if place.type != "cuda" or clear is None:
        return 0
    torch.cuda.synchronize(place)
    before = torch.cuda.memory_allocated(place)
    clear()
    return int(before - torch.cuda.memory_allocated(place))


def _loss(model: Model, result: Any, repeats: int) -> tuple[float, float, int]:
    """Forward, backward, and bytes kept, of the loss on the model's result."""
    forward, backward = [], []
    excluded = model_storages(model.module)
    storages: dict[Any, int] = {}
    alive: list[object] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        key, num_bytes, storage = storage_of(tensor)
        if num_bytes and key not in excluded:
            storages[key] = num_bytes
            alive.append(storage)
        return tensor

    for current in range(repeats + 1):
        leaves, inputs = _leaves(result)
        place = next((one.device for one in pytree.tree_leaves(leaves) if isinstance(one, torch.Tensor)), None)
        found: list[torch.Tensor] = []
        with torch.enable_grad():
            if current == 0:
                with torch.autograd.graph.saved_tensors_hooks(save, lambda one: one):
                    found.append(model.loss(leaves, model.target))
            else:
                forward.append(_seconds(lambda: found.append(model.loss(leaves, model.target)), place))  # noqa: B023
            if not found[0].requires_grad:
                return statistics.median(forward or [0.0]), 0.0, sum(storages.values())
            taken = _seconds(lambda: torch.autograd.grad(found[0], inputs, allow_unused=True), place)  # noqa: B023
            if current:
                backward.append(taken)
    return statistics.median(forward), statistics.median(backward), sum(storages.values())


def _adding_s(parameters: Sequence[torch.nn.Parameter]) -> float:
    """Adding gradients to those that are there: on a CPU each right after it was made, as in backward, so that it is
    still in a cache; on a GPU all of them, for one would end before its clock does."""
    place = parameters[0].device
    taken = 0.0
    for part in [[one] for one in parameters] if place.type == "cpu" else [parameters]:
        pairs = [(one.grad, torch.zeros_like(one)) for one in part]
        taken += _seconds(lambda: [there.add_(made) for there, made in pairs if there is not None], place)  # noqa: B023
    return taken


def _seconds(call: Callable[[], object], place: torch.device | None) -> float:
    on_cuda = place is not None and place.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize(place)
    start = time.perf_counter()
    call()
    if on_cuda:
        torch.cuda.synchronize(place)
    return time.perf_counter() - start


def cut_indices(profile: Profile, names: Sequence[str]) -> list[int]:
    """The places of a plan's cuts among the profile's units; refuses those of another model."""
    known = {unit.name: index for index, unit in enumerate(profile.units[:-1])}
    for name in names:
        if name not in known:
            raise UsageError(
                f"the plan cuts after {name!r}, but {profile.model!r} has no such unit; its units are "
                f"{profile.units[0].name} … {profile.units[-1].name}: is it a plan for another model?"
            )
    places = [known[name] for name in names]
    if places != sorted(set(places)):
        raise UsageError(f"cuts {list(names)} are not in the order of the model")
    return places
