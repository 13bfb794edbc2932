"""Measure whole stages instead of adding up their units, to validate a split.

Every stage of the given splits is built from the graph and timed alone on its real inputs. Rounds go over all stages,
so that a slow phase of the machine affects every split equally.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from stagewright.cluster.device import Device
from stagewright.errors import UsageError
from stagewright.graph.preserve import preserved
from stagewright.machine.cpu_offload import offloaded, resident
from stagewright.profiler.profile import StageTime
from stagewright.profiler.replay import Replay, Stopwatch

if TYPE_CHECKING:
    from stagewright.graph.unit_graph import UnitGraph

UnitRange = tuple[int, int]


def measure_stages(
    graph: UnitGraph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    splits: Sequence[Sequence[int]],
    device: Device | str = "cpu",
    repeats: int = 5,
    training: bool = True,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[list[StageTime]]:
    """Measure every stage of every split; a split is given by the indices of its cuts."""
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}, but at least 1 is needed")
    device = Device.parse(device) if isinstance(device, str) else device
    num_units = len(graph.calls)
    ranges = [_ranges(cuts, num_units) for cuts in splits]
    distinct = sorted({stage for stages in ranges for stage in stages})
    with preserved(graph.model), device.pinned():
        torch_device = device.torch_device()
        with offloaded(graph.model, torch_device):
            replays = _replays(graph, tuple(args), kwargs or {}, distinct, training=training)
        stopwatch = Stopwatch(torch_device)
        for current_round in range(repeats + 1):
            for done, (stage, replay) in enumerate(replays.items()):
                if progress is not None:
                    progress(current_round * len(replays) + done, (repeats + 1) * len(replays), _name(graph, stage))
                with resident(replay.module, torch_device):
                    if current_round:
                        replay.sample(stopwatch)
                    else:
                        replay.warm_up(stopwatch)
    if progress is not None:
        progress((repeats + 1) * len(replays), (repeats + 1) * len(replays), "stages")
    times = {stage: _stage_time(replay) for stage, replay in replays.items()}
    return [[times[stage] for stage in stages] for stages in ranges]


def _ranges(cuts: Sequence[int], num_units: int) -> list[UnitRange]:
    """Return the first and last unit of every stage."""
    return list(zip([0, *(cut + 1 for cut in cuts)], [*cuts, num_units - 1], strict=True))


def _name(graph: UnitGraph, stage: UnitRange) -> str:
    return f"{graph.calls[stage[0]].name} … {graph.calls[stage[1]].name}"


def _replays(
    graph: UnitGraph, args: tuple[Any, ...], kwargs: Mapping[str, Any], stages: Sequence[UnitRange], *, training: bool
) -> dict[UnitRange, Replay]:
    """Build each stage with the inputs that it gets in a real run."""
    inputs: dict[int, Sequence[Any]] = {0: graph.flatten(args, kwargs)}
    starts = sorted({first for first, _ in stages})
    with torch.no_grad():
        for start, following in itertools.pairwise(starts):
            inputs[following] = graph.stage(start, following - 1)(*inputs[start])
    replays: dict[UnitRange, Replay] = {}
    for first, last in stages:
        values = inputs[first]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        needs = [first > 0 and tensor.is_floating_point() for tensor in tensors]
        replays[first, last] = Replay(
            _name(graph, (first, last)),
            graph.stage(first, last),
            values,
            {},
            training=training,
            needs_gradient=needs,
            is_whole=True,
        )
    return replays


def _stage_time(replay: Replay) -> StageTime:
    forward, backward_input, backward_weight = replay.times()
    return StageTime(
        forward=forward,
        backward_s=backward_input.median_s + backward_weight.median_s,
        backward_spread_s=backward_input.spread_s + backward_weight.spread_s,
    )
