"""Measure a model unit by unit: time, memory and multiply-accumulates of every call, and of the whole model.

Units are timed alone, on the inputs that they got in a real run, in rounds over all units and the whole model, so that
a slow phase of the machine hits all of them alike. So is what the model does between them, which counts with the unit
in whose stage it runs. Calls that are alike in class, inputs, parameters and work (the
blocks of a transformer) cost the same, so they share their samples. The model is left as it was: buffers, random
numbers, gradients. The recorded inputs of all units stay in memory while the rounds run, at most what a training step
keeps.

Of a model that does not fit on its device (``cluster.hosted``) each unit is there while it is measured; the whole model
and what lies between units are not measured then.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stagewright.cluster.device import Device
from stagewright.errors import ModelError, UsageError
from stagewright.graph.macs import count_macs
from stagewright.graph.preserve import preserved
from stagewright.machine.cpu_offload import is_hosted, may_stay, resident, visiting
from stagewright.profiler.cache import ProfileCache
from stagewright.profiler.identity import library_versions, profile_key
from stagewright.profiler.profile import Amount, Profile, UnitProfile, amounts_of_held
from stagewright.profiler.replay import Replay, Stopwatch, added
from stagewright.profiler.saved_activations import Kept, watch_kept
from stagewright.profiler.storage import model_storages, tensors_in

if TYPE_CHECKING:
    from stagewright.graph.unit_graph import UnitGraph

__all__ = ["profile"]

Progress = Callable[[int, int, str], None]


def profile(
    graph: UnitGraph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str,
    device: Device | str = "cpu",
    repeats: int = 5,
    training: bool = True,
    cache: bool | str | Path = True,
    fresh: bool = False,
    part: str = "whole layers",
    progress: Progress | None = None,
) -> Profile:
    """What every unit of the captured model costs on a device, measured or taken from the cache.

    With `training`, forward and backward are measured; without, forward alone and without gradients. Modules
    stay in the mode (`train()` or `eval()`) that they are in. `cache` is a folder, True for the usual one, or
    False; with `fresh` what is there is not read, but replaced. `part` says what of its layers the model holds.
    `progress(done, total, name)` is called before each step of the work and once at its end.
    """
    device = Device.parse(device) if isinstance(device, str) else device
    kwargs = dict(kwargs or {})
    _check(graph, args, kwargs, device=device, repeats=repeats, training=training)
    store = ProfileCache(None if cache is True else Path(cache)) if cache is not False else None
    source = "measured"
    if store is not None:
        key = profile_key(graph, args, kwargs, name=name, device=device, repeats=repeats, training=training, part=part)
        found, refusal = (None, "") if fresh else store.profile(key)
        if found is not None:
            # Another core or GPU of the same kind costs the same.
            return replace(found, device=device.text)
        source = f"measured: {refusal}" if refusal else source
        store.check_writable()
    measured = _measure(
        graph,
        args,
        kwargs,
        name=name,
        device=device,
        repeats=repeats,
        training=training,
        source=source,
        progress=progress or (lambda done, total, step: None),
    )
    if store is not None:
        store.save_profile(key, measured)
    return measured


def _check(
    graph: UnitGraph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    device: Device,
    repeats: int,
    training: bool,
) -> None:
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}, but at least 1 is needed")
    target = device.torch_device()
    inputs = tensors_in((tuple(args), dict(kwargs)))
    for tensor in inputs:
        if tensor.device != target:
            raise UsageError(
                f"inputs of the model are on {tensor.device}, but {device} is asked for; "
                f'move them and the model with .to("{target}") and capture again'
            )
    for name, parameter in graph.model.named_parameters():
        if parameter.device != target and not (inputs and parameter.device.type == "cpu" and may_stay(graph.model)):
            raise UsageError(
                f"the model's {name} is on {parameter.device}, but {device} is asked for; move the model with "
                f'.to("{target}") and capture it again, or offload it with stagewright.machine.cpu_offload.settle'
            )
    if training and not any(parameter.requires_grad for parameter in graph.model.parameters()):
        raise UsageError("no parameter of the model needs a gradient; profile it with training=False (--inference)")


def _first_run(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> int:
    """MACs of a run; a model that does not run with so many samples says so."""
    try:
        return count_macs(model, args, kwargs)
    except (ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate" in str(error):
            raise
        shapes = ", ".join(
            f"{one.dtype} {list(one.shape)}".removeprefix("torch.") for one in tensors_in((args, kwargs))
        )
        raise ModelError(
            f"{name!r} {'in training ' if model.training else ''}does not run on {shapes}: {type(error).__name__}: "
            f"{error}; where that is too few samples for it, give a larger --batch or fewer --microbatches"
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
    source: str,
    progress: Progress,
) -> Profile:
    place = device.torch_device()
    stopwatch = Stopwatch(place)
    hosted = is_hosted(graph.model, place)
    steps = _Steps(progress, total=2 + (repeats + 2) * len(graph.calls) + (0 if hosted else repeats + 1))
    with device.pinned(), preserved(graph.model):
        with visiting(graph.model, place):
            steps.next("whole model")
            whole_macs = _first_run(graph.model, args, kwargs, name)
            steps.next("bytes kept")
            kept = (
                watch_kept(graph, args, kwargs)
                if training
                else tuple(Kept(kept_bytes=Amount(total=0), needs_gradient=()) for _ in graph.calls)
            )
            whole = Replay("whole model", graph.model, args, kwargs, training=training, is_whole=True)
            replays = _replays(graph, args, kwargs, kept, steps, training=training)
            glue = [] if hosted else _glue_replays(graph, args, kwargs, training=training)
        steps.more((repeats + 1) * len(glue))
        with _no_garbage_collection():
            for current_round in range(repeats + 1):
                for replay in (*(() if hosted else (whole,)), *replays, *(one for _, one in glue)):
                    steps.next(replay.name)
                    with resident(replay.module, place):
                        if current_round:
                            replay.sample(stopwatch)
                        else:
                            replay.warm_up(stopwatch)
        working = []
        for replay in replays:
            with resident(replay.module, place):
                working.append(replay.working_bytes(place))
        own_storages = model_storages(graph.model)
        recompute_kept = [replay.input_bytes(own_storages) if training else 0 for replay in replays]
    steps.finish(name)
    whole_forward, _, whole_backward = whole.times()
    batch_size = graph.batch_size_of(tuple(args), kwargs)
    return Profile(
        model=name,
        device=device.text,
        dtype=_dtype(graph, args, kwargs),
        batch_size=batch_size,
        training=training,
        units=_units(graph, batch_size, replays, glue, kept, recompute_kept, working),
        whole_forward=whole_forward,
        whole_backward=whole_backward,
        whole_macs=whole_macs,
        versions=library_versions(),
        source=source,
    )


def _replays(
    graph: UnitGraph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    kept: Sequence[Kept],
    steps: _Steps,
    *,
    training: bool,
) -> list[Replay]:
    replays = []
    with torch.no_grad(), preserved(graph.model):
        # Each unit is looked at before the graph runs it, while its inputs are what they were.
        for recorded, needs in zip(graph.record(tuple(args), dict(kwargs)), kept, strict=True):
            steps.next(recorded.call.name)
            replays.append(
                Replay(
                    recorded.call.name,
                    recorded.module,
                    recorded.args,
                    recorded.kwargs,
                    training=training,
                    needs_gradient=needs.needs_gradient,
                )
            )
    return replays


def _glue_replays(
    graph: UnitGraph, args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool
) -> list[tuple[int, Replay]]:
    """What lies between units, each piece with the unit that it goes with."""
    found = []
    with torch.set_grad_enabled(training), preserved(graph.model):
        for piece in graph.record_between(tuple(args), dict(kwargs)):
            needs = [one.requires_grad for one in tensors_in((piece.args, {}))]
            name = f"before {graph.calls[piece.unit].name}"
            replay = Replay(name, piece.module, piece.args, {}, training=training, needs_gradient=needs)
            found.append((piece.unit, replay))
    return found


def _units(
    graph: UnitGraph,
    batch_size: int,
    replays: Sequence[Replay],
    glue: Sequence[tuple[int, Replay]],
    kept: Sequence[Kept],
    recompute_kept: Sequence[int],
    working: Sequence[tuple[int, int]],
) -> tuple[UnitProfile, ...]:
    modules = [graph.module(call) for call in graph.calls]
    num_elements: list[Mapping[Hashable, int]] = []
    num_bytes: list[Mapping[Hashable, int]] = []
    for call in graph.calls:
        held = graph.parameters_of(call).values()
        num_elements.append({id(one): one.numel() for one in held})
        num_bytes.append({id(one): one.numel() * one.element_size() for one in held})
    parameters, parameter_bytes = amounts_of_held(num_elements), amounts_of_held(num_bytes)
    alike: dict[Hashable, list[Replay]] = {}
    for replay in replays:
        alike.setdefault(replay.likeness, []).append(replay)
    units = []
    for index, call in enumerate(graph.calls):
        forward, backward_input, backward_weight = replays[index].times(alike[replays[index].likeness])
        glue_s = 0.0
        for piece in (one for unit, one in glue if unit == index):
            passes = piece.times()
            forward = added(forward, passes[0])
            backward_input = added(backward_input, added(*passes[1:]))
            glue_s += sum(one.median_s for one in passes)
        units.append(
            UnitProfile(
                name=call.name,
                kind=call.kind,
                block=call.block,
                parameters=parameters[index],
                parameter_bytes=parameter_bytes[index],
                buffer_bytes=sum(one.numel() * one.element_size() for one in modules[index].buffers()),
                macs=replays[index].macs,
                forward=forward,
                backward_input=backward_input,
                backward_weight=backward_weight,
                output_bytes=replays[index].output_bytes,
                kept_bytes=kept[index].kept_bytes,
                recompute_kept_bytes=recompute_kept[index],
                crossing_bytes=graph.crossing_bytes(index, batch_size) if index < len(graph.cuts) else 0,
                forward_working_bytes=working[index][0],
                backward_working_bytes=working[index][1],
                glue_s=glue_s,
            )
        )
    return tuple(units)


def _dtype(graph: UnitGraph, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The dtype of the first floating parameter, or else input."""
    for tensor in [*graph.model.parameters(), *tensors_in((tuple(args), dict(kwargs)))]:
        if tensor.is_floating_point():
            return str(tensor.dtype).removeprefix("torch.")
    return "none"


class _Steps:
    """Counts the steps of the work for the progress callback."""

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


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
