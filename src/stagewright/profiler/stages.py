"""Measure whole stages, not the sum of their units: the test of a split.

Each stage that any of the given splits has is built from the graph and timed alone on the values that reach it, in
rounds over all of them, so that a slow phase of the machine hits every split alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from stagewright.cluster.device import Device
from stagewright.errors import UsageError
from stagewright.graph.preserve import preserved
from stagewright.machine.cpu_offload import resident, visiting
from stagewright.profiler.profile import StageTime
from stagewright.profiler.replay import Replay, Stopwatch

if TYPE_CHECKING:
    from stagewright.graph.unit_graph import UnitGraph

__all__ = ["measure_stages"]

Range = tuple[int, int]


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
    """The measured times of every stage of every split; a split is given by its cuts, by index."""
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}, but at least 1 is needed")
    device = Device.parse(device) if isinstance(device, str) else device
    num_units = len(graph.calls)
    ranges = [_ranges(cuts, num_units) for cuts in splits]
    wanted = sorted({one for stages in ranges for one in stages})
    with preserved(graph.model), device.pinned():
        place = device.torch_device()
        with visiting(graph.model, place):
            replays = _replays(graph, tuple(args), kwargs or {}, wanted, training=training)
        stopwatch = Stopwatch(place)
        for current_round in range(repeats + 1):
            for done, (one, replay) in enumerate(replays.items()):
                if progress is not None:
                    progress(current_round * len(replays) + done, (repeats + 1) * len(replays), _name(graph, one))
                with resident(replay.module, place):
                    if current_round:
                        replay.sample(stopwatch)
                    else:
                        replay.warm_up(stopwatch)
    if progress is not None:
        progress((repeats + 1) * len(replays), (repeats + 1) * len(replays), "stages")
    times = {one: _stage_time(replay) for one, replay in replays.items()}
    return [[times[one] for one in stages] for stages in ranges]


def _ranges(cuts: Sequence[int], num_units: int) -> list[Range]:
    """First and last unit of every stage."""
    return list(zip([0, *(cut + 1 for cut in cuts)], [*cuts, num_units - 1], strict=True))


def _name(graph: UnitGraph, one: Range) -> str:
    return f"{graph.calls[one[0]].name} … {graph.calls[one[1]].name}"


def _replays(
    graph: UnitGraph, args: tuple[Any, ...], kwargs: Mapping[str, Any], wanted: Sequence[Range], *, training: bool
) -> dict[Range, Replay]:
    """Each stage with the values that reach it in a real run."""
    inputs: dict[int, Sequence[Any]] = {0: graph.flatten(args, kwargs)}
    starts = sorted({first for first, _ in wanted})
    with torch.no_grad():
        for start, following in itertools.pairwise(starts):
            inputs[following] = graph.stage(start, following - 1)(*inputs[start])
    found: dict[Range, Replay] = {}
    for first, last in wanted:
        values = inputs[first]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        needs = [first > 0 and tensor.is_floating_point() for tensor in tensors]
        found[first, last] = Replay(
            _name(graph, (first, last)),
            graph.stage(first, last),
            values,
            {},
            training=training,
            needs_gradient=needs,
            is_whole=True,
        )
    return found


def _stage_time(replay: Replay) -> StageTime:
    forward, backward_input, backward_weight = replay.times()
    return StageTime(
        forward=forward,
        backward_s=backward_input.median_s + backward_weight.median_s,
        backward_spread_s=backward_input.spread_s + backward_weight.spread_s,
    )
