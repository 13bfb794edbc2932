"""Measure a model unit by unit: time, memory and multiply-accumulates of every call, and of the whole model.

Units are timed alone, on the inputs that they got in a real run. Rounds go over all units and the whole model, so that
a slow phase of the machine affects all of them equally. Glue operations between units are timed the same way and count
for the unit in whose stage they run. Calls with equal class, inputs, parameters and work (the blocks of a transformer)
cost the same, so they pool their samples. The state of the model is preserved: buffers, random numbers, gradients. The
recorded inputs of all units stay in memory during the rounds, at most the saved activations of a training step.

If a model does not fit on its device (``machine.cpu_offload``), each unit is on the device only while it is measured,
and the whole model and the glue operations are not measured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stagewright.cluster.device import Device
from stagewright.errors import ModelError, UsageError
from stagewright.graph.compilation import compiled_units
from stagewright.graph.macs import count_macs
from stagewright.graph.preserve import preserved
from stagewright.machine.cpu_offload import is_offloaded, offloaded, resident, was_offloaded
from stagewright.machine.garbage_collection import no_garbage_collection
from stagewright.machine.hollow import is_hollow_model
from stagewright.profiler.attention import profile_attention
from stagewright.profiler.cache import ProfileCache
from stagewright.profiler.glue import GlueReplay, add_glue_memory, glue_replays
from stagewright.profiler.identity import class_without_source, library_versions, profile_key
from stagewright.profiler.profile import Amount, AttentionProfile, Profile, UnitProfile, amounts_with_shares
from stagewright.profiler.replay import Replay, Stopwatch, add_times
from stagewright.profiler.saved_activations import SavedActivations, measure_saved_activations
from stagewright.profiler.storage import model_storages, tensors_in
from stagewright.profiler.whole_model import scale_units, whole_replay

if TYPE_CHECKING:
    from stagewright.graph.unit_graph import UnitGraph

Progress = Callable[[int, int, str], None]


def profile(
    graph: UnitGraph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    device: Device | str = "cpu",
    repeats: int = 5,
    training: bool = True,
    cache: bool | str | Path = True,
    fresh: bool = False,
    part: str = "whole layers",
    compile: str = "none",
    autocast: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure what every unit of the captured model costs on a device, or read it from the cache.

    Modules stay in their mode (``train()`` or ``eval()``).

    Args:
        graph: The captured model.
        args: Positional arguments of one forward call.
        kwargs: Keyword arguments of that call.
        name: The model's name in tables and in the cache, by default the name that it was captured under. A model
            without a name is cached only if the source of its classes can be read: nothing else
            distinguishes two such models.
        device: ``cuda:0``, or ``cpu:0-1`` for pinned cores.
        repeats: How many times to measure.
        training: Whether to measure backward too.
        cache: A folder, True for the default one, or False.
        fresh: Whether to measure again and replace the cached profile.
        part: Which part of its layers the model holds, for the cache.
        compile: What runs compiled: none, units, or stages; for stages, the times of all units are scaled so that they
            add up to the time of the whole model as one compiled stage.
        autocast: The dtype of autocast operations; None: no autocast.
        progress: Called with ``(done, total, name)`` before each step of the measurement and once at its end.

    Example:
        profile = sw.profile(graph, (x,), repeats=1, cache=False)
        print(profile)
    """
    device = Device.parse(device) if isinstance(device, str) else device
    kwargs = dict(kwargs or {})
    _check(graph, args, kwargs, device=device, repeats=repeats, training=training)
    store = ProfileCache(None if cache is True else Path(cache)) if cache is not False else None
    source = "measured"
    if name is None:
        name = graph.name
        unreadable = class_without_source(graph.model) if store is not None else None
        if unreadable is not None:
            store, source = None, f"measured: not cached, because the source of {unreadable} can't be read; give a name"
    if store is not None:
        key = profile_key(
            graph,
            args,
            kwargs,
            name=name,
            device=device,
            repeats=repeats,
            training=training,
            part=part,
            compile=compile,
            autocast=autocast,
        )
        cached, reason = (None, "") if fresh else store.profile(key)
        if cached is not None:
            # Another core or GPU of the same kind costs the same.
            return replace(cached, device=device.text)
        source = f"measured: {reason}" if reason else source
        store.check_writable()
    target = device.torch_device().type
    is_mixed = autocast is not None
    with torch.autocast(target, dtype=autocast, enabled=is_mixed, cache_enabled=False) if is_mixed else nullcontext():
        measured = _measure(
            graph,
            args,
            kwargs,
            name=name,
            device=device,
            repeats=repeats,
            training=training,
            compile=compile,
            source=source,
            progress=progress or (lambda done, total, step: None),
        )
    if store is not None:
        store.save_profile(key, measured)
    return measured


def _check(
    graph: UnitGraph, args: Sequence[Any], kwargs: Mapping[str, Any], *, device: Device, repeats: int, training: bool
) -> None:
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}, but at least 1 is needed")
    target = device.torch_device()
    inputs = tensors_in((tuple(args), dict(kwargs)))
    for tensor in inputs:
        if tensor.device != target:
            raise UsageError(
                f"the model's inputs are on {tensor.device}, but the profile is for {device}; "
                f'move them and the model with .to("{target}") and capture again'
            )
    for name, parameter in graph.model.named_parameters():
        is_on_host = bool(inputs) and parameter.device.type == "cpu" and was_offloaded(graph.model)
        if parameter.device != target and not is_on_host:
            raise UsageError(
                f"the model's {name} is on {parameter.device}, but the profile is for {device}; move the model with "
                f'.to("{target}") and capture it again, or offload it with '
                "stagewright.machine.cpu_offload.move_or_offload"
            )
    if training and not any(parameter.requires_grad for parameter in graph.model.parameters()):
        raise UsageError("no parameter of the model requires a gradient; profile it with training=False (--inference)")


def _first_run(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> int:
    """Count the MACs of one run; explain the error if the model does not run on this batch."""
    try:
        return count_macs(model, args, kwargs)
    except (ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate" in str(error):
            raise
        shapes = ", ".join(
            f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.") for tensor in tensors_in((args, kwargs))
        )
        raise ModelError(
            f"{name!r} {'in training ' if model.training else ''}does not run on {shapes}: {type(error).__name__}: "
            f"{error}; if that is too few samples, give a larger --batch or fewer --microbatches"
        ) from error


def _measure(
    graph: UnitGraph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    name: str,
    device: Device,
    repeats: int,
    training: bool,
    compile: str,
    source: str,
    progress: Progress,
) -> Profile:
    torch_device = device.torch_device()
    stopwatch = Stopwatch(torch_device)
    on_host = is_offloaded(graph.model, torch_device) or is_hollow_model(graph.model)
    steps = _Steps(progress, total=2 + (repeats + 2) * len(graph.calls) + (0 if on_host else repeats + 1))
    with device.pinned(), preserved(graph.model):
        with offloaded(graph.model, torch_device):
            steps.next("whole model")
            whole_macs = _first_run(graph.model, args, kwargs, name)
            steps.next("saved activations")
            saved = (
                measure_saved_activations(graph, args, kwargs)
                if training
                else tuple(SavedActivations(saved_bytes=Amount(total=0), needs_gradient=()) for _ in graph.calls)
            )
            whole = whole_replay(graph, args, kwargs, training=training, as_stage=compile == "stages")
            replays = _replays(graph, args, kwargs, saved, steps, training=training)
            glue = [] if on_host else glue_replays(graph, args, kwargs, training=training)
        steps.more((repeats + 1) * len(glue))
        with nullcontext() if compile == "none" else compiled_units(graph.module(call) for call in graph.calls):
            if training and compile != "none" and not on_host:
                saved = measure_saved_activations(graph, args, kwargs)
            gc.collect()
            with no_garbage_collection():
                for current_round in range(repeats + 1):
                    for replay in (*(() if on_host else (whole,)), *replays, *(segment.replay for segment in glue)):
                        steps.next(replay.name)
                        with resident(replay.module, torch_device):
                            if current_round:
                                replay.sample(stopwatch)
                            else:
                                replay.warm_up(stopwatch)
                first_pass_s, following_pass_s = (0.0, 0.0) if on_host else whole.pass_times(stopwatch)
            working = []
            for replay in replays:
                with resident(replay.module, torch_device):
                    working.append(replay.working_bytes(torch_device))
            if compile != "stages":  # a compiled stage has no operations between its units
                working = add_glue_memory(working, replays, glue, torch_device)
        storages = model_storages(graph.model)
        recompute_saved = [replay.input_bytes(storages) if training else 0 for replay in replays]
        attention: Sequence[AttentionProfile | None] = [None] * len(replays)
        if training and compile == "none":
            attention = profile_attention(graph, args, kwargs, replays, torch_device, repeats=repeats)
    steps.finish(name)
    batch_size = graph.batch_size_of(tuple(args), kwargs)
    whole_forward, _, whole_backward = whole.times()
    units = _units(graph, batch_size, replays, glue, saved, recompute_saved, working, attention)
    if compile == "stages" and not on_host:
        units = scale_units(units, whole_forward.median_s, whole_backward.median_s)
    return Profile(
        model=name,
        device=device.text,
        dtype=_dtype(graph, args, kwargs),
        batch_size=batch_size,
        training=training,
        units=units,
        whole_forward=whole_forward,
        whole_backward=whole_backward,
        whole_macs=whole_macs,
        versions=library_versions(),
        first_pass_s=first_pass_s,
        following_pass_s=following_pass_s,
        source=source,
    )


def _replays(
    graph: UnitGraph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    saved: Sequence[SavedActivations],
    steps: _Steps,
    *,
    training: bool,
) -> list[Replay]:
    replays = []
    with torch.no_grad(), preserved(graph.model):
        # Each unit is inspected before the graph runs it, while its inputs are still unchanged.
        for recorded, activations in zip(graph.record(tuple(args), dict(kwargs)), saved, strict=True):
            steps.next(recorded.call.name)
            replays.append(
                Replay(
                    recorded.call.name,
                    recorded.module,
                    recorded.args,
                    recorded.kwargs,
                    training=training,
                    needs_gradient=activations.needs_gradient,
                )
            )
    return replays


def _units(
    graph: UnitGraph,
    batch_size: int,
    replays: Sequence[Replay],
    glue: Sequence[GlueReplay],
    saved: Sequence[SavedActivations],
    recompute_saved: Sequence[int],
    working: Sequence[tuple[int, int]],
    attention: Sequence[AttentionProfile | None],
) -> tuple[UnitProfile, ...]:
    modules = [graph.module(call) for call in graph.calls]
    num_elements: list[Mapping[Hashable, int]] = []
    num_bytes: list[Mapping[Hashable, int]] = []
    for call in graph.calls:
        values = graph.parameters_of(call).values()
        num_elements.append({id(value): value.numel() for value in values})
        num_bytes.append({id(value): value.numel() * value.element_size() for value in values})
    parameters, parameter_bytes = amounts_with_shares(num_elements), amounts_with_shares(num_bytes)
    alike: dict[Hashable, list[Replay]] = {}
    for replay in replays:
        alike.setdefault(replay.cost_key, []).append(replay)
    units = []
    for index, call in enumerate(graph.calls):
        forward, backward_input, backward_weight = replays[index].times(alike[replays[index].cost_key])
        glue_s = 0.0
        for segment in (segment for segment in glue if segment.unit == index):
            passes = segment.replay.times()
            forward = add_times(forward, passes[0])
            backward_input = add_times(backward_input, add_times(*passes[1:]))
            glue_s += sum(time.median_s for time in passes)
        units.append(
            UnitProfile(
                name=call.name,
                kind=call.kind,
                block=call.block,
                parameters=parameters[index],
                parameter_bytes=parameter_bytes[index],
                buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in modules[index].buffers()),
                macs=replays[index].macs,
                forward=forward,
                backward_input=backward_input,
                backward_weight=backward_weight,
                output_bytes=replays[index].output_bytes,
                saved_bytes=saved[index].saved_bytes,
                recompute_saved_bytes=recompute_saved[index],
                crossing_bytes=graph.crossing_bytes(index, batch_size) if index < len(graph.cuts) else 0,
                forward_working_bytes=working[index][0],
                backward_working_bytes=working[index][1],
                largest_parameter_bytes=max(num_bytes[index].values(), default=0),
                glue_s=glue_s,
                attention=attention[index],
            )
        )
    return tuple(units)


def _dtype(graph: UnitGraph, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the dtype of the first floating-point parameter, or else input."""
    for tensor in [*graph.model.parameters(), *tensors_in((tuple(args), dict(kwargs)))]:
        if tensor.is_floating_point():
            return str(tensor.dtype).removeprefix("torch.")
    return "none"


class _Steps:
    """A counter of finished steps for the progress callback."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def next(self, name: str) -> None:
        self._progress(self._done, self._total, name)
        self._done += 1

    def more(self, count: int) -> None:
        self._total += count

    def finish(self, name: str) -> None:
        self._progress(self._total, self._total, name)
