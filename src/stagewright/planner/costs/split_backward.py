"""The cost of a split backward, as in zero-bubble schedules, relative to an unsplit one.

    unsplit   ◄─── all gradients ───                 a unit's profile has this and its input-gradient part; the rest
    split     ◄── input gradients ──  ◄ weights ►    counts as weight gradients, as if splitting were free

torch walks the graph to find the nodes that the weight gradients need, keeps their gradients, and starts again for each
group of weights. Both halves are therefore measured as the engine runs them, on the model without its first unit.
Between the halves, saved activations and those gradients stay in memory; a GPU's allocator shows how much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from stagewright.engine.pipeline.backward import BackwardState, run_backward, run_input_backward, run_weight_backward
from stagewright.graph.unit_graph import UnitGraph
from stagewright.machine.out_of_memory import oom_error
from stagewright.profiler.profile import Profile, amount_of
from stagewright.profiler.replay import Stopwatch
from stagewright.zoo.model import Model


@dataclass(frozen=True, slots=True)
class SplitBackwardCost:
    """A split backward relative to an unsplit one."""

    inputs: float = 1.0
    """Slowdown of the input-gradient half relative to the profile."""
    weights: float = 1.0
    """Slowdown of the weight-gradient half."""
    held_share: float = 0.0
    """Extra memory between the halves, as a fraction of the saved activations; 0 on a CPU."""


def measure_split_backward(graph: UnitGraph, model: Model, profile: Profile, rounds: int) -> SplitBackwardCost:
    """Measure both halves.

    The fastest of several rounds counts, because a disturbance of one measurement would distort the ratio.
    """
    units = profile.units[1:]
    inputs_s = sum(unit.backward_input.median_s for unit in units)
    weights_s = sum(unit.backward_weight.median_s for unit in units)
    if not inputs_s or not weights_s:
        return SplitBackwardCost()
    try:
        measured = [_round(graph, model) for _ in range(rounds + 1)][1:]
    except RuntimeError as error:  # torch can't split this backward; a run would report it
        if oom_error(error, who="this model", doing="backward") is not None:
            raise
        return SplitBackwardCost()
    if not all(measured):
        return SplitBackwardCost()
    saved = amount_of([unit.saved_bytes for unit in profile.units], 1, len(profile.units) - 1)
    held = max(0.0, measured[0][3] / saved) if saved else 0.0
    return SplitBackwardCost(*_factors([times[:3] for times in measured], inputs_s, weights_s), held)


def whole_backward_cost(profile: Profile) -> SplitBackwardCost:
    """Return the cost of compiled stages, whose input-gradient half computes the weight gradients too."""
    inputs_s = sum(unit.backward_input.median_s for unit in profile.units)
    weights_s = sum(unit.backward_weight.median_s for unit in profile.units)
    return SplitBackwardCost(inputs=1 + weights_s / inputs_s, weights=0.0) if inputs_s else SplitBackwardCost()


def _factors(measured: Sequence[tuple[float, ...]], inputs_s: float, weights_s: float) -> tuple[float, float]:
    """Return the slowdowns from rounds of (unsplit, first half, second half) and the profile's times."""
    whole_s, first_s, second_s = (min(times) for times in zip(*measured, strict=True))
    scale = whole_s / (inputs_s + weights_s)
    return first_s / (inputs_s * scale), second_s / (weights_s * scale)


def _round(graph: UnitGraph, model: Model) -> tuple[float, ...]:
    """Measure the seconds of the unsplit backward and both halves, and the extra bytes held between the halves.

    Return () if no gradient reaches the first unit.
    """
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    with torch.no_grad():
        crossing = graph.stage(0, 0)(*graph.flatten(model.args, model.kwargs))
    stage = graph.stage(1, len(graph.calls) - 1)
    times: list[float] = []
    device = parameters[0].device
    stopwatch = Stopwatch(device)
    for split in (False, True):
        values = [
            value.detach().requires_grad_() if needed else value
            for value, needed in zip(crossing, graph.needs_gradient(0), strict=True)
        ]
        with torch.enable_grad():
            outputs = [output.clone() for output in _differentiable(stage(*values))]
        state = BackwardState(_differentiable(values), list(outputs))
        gradients = [torch.ones_like(output) for output in outputs]
        if not state.inputs or not outputs:
            return ()
        calls: list[Callable[[], object]] = [partial(run_backward, state, gradients)]
        if split:
            calls = [
                partial(run_input_backward, state, gradients, parameters),
                partial(run_weight_backward, state, parameters),
            ]
        before = _allocated_bytes(device)
        for call in calls:
            results, seconds = stopwatch.time([call])
            times.append(seconds)
            if len(times) == 2:  # after the first half; the input gradients are sent on
                sent = sum(gradient.numel() * gradient.element_size() for gradient in results[0])  # type: ignore[attr-defined]
                held_bytes = _allocated_bytes(device) - before - sent
            del results
        for parameter in parameters:
            parameter.grad = None
    return *times, held_bytes


def _differentiable(values: Sequence[object]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]


def _allocated_bytes(device: torch.device) -> int:
    """Return the bytes allocated on a GPU; 0 on a CPU."""
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0
