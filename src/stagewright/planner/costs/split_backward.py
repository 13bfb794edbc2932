"""What it costs to do a backward pass in two halves, as zero-bubble schedules do: more than the same in one piece.

    in one piece   ◄─── all gradients ───              a unit's profile has this, and the inputs' part of it; the rest
    in halves      ◄── inputs' gradients ──  ◄ weights' ►     counts as the weights', as if halving cost nothing

torch walks the graph to find what the weights hang on, keeps it, and begins anew for each group of weights. So both
halves are measured as the engine does them, on the model behind its first unit, beside the whole. Between them what
forward kept is still there, and with it the gradients that the weights wait for: a GPU's allocator tells how much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from stagewright.engine.pipeline.backward import BackwardState, run_input_backward, run_weight_backward, run_backward
from stagewright.graph.unit_graph import UnitGraph
from stagewright.machine.out_of_memory import refusal_of
from stagewright.profiler.profile import Profile, amount_of
from stagewright.profiler.replay import Stopwatch
from stagewright.zoo.model import Model

__all__ = ["SplitBackwardCost", "measure_split_backward"]


@dataclass(frozen=True, slots=True)
class SplitBackwardCost:
    """A backward pass in two halves, beside one in one piece."""

    inputs: float = 1.0
    """How much longer each half takes than the profile's units say."""
    weights: float = 1.0
    held_share: float = 0.0
    """What is held between them beside what forward kept, as a share of that; 0 where no allocator tells."""


def measure_split_backward(graph: UnitGraph, model: Model, profile: Profile, rounds: int) -> SplitBackwardCost:
    """Both halves, measured.

    The shortest of some rounds, for a ratio of two of them is spoilt by anything that disturbs one.
    """
    units = profile.units[1:]
    inputs_s = sum(unit.backward_input.median_s for unit in units)
    weights_s = sum(unit.backward_weight.median_s for unit in units)
    if not inputs_s or not weights_s:
        return SplitBackwardCost()
    try:
        taken = [_round(graph, model) for _ in range(rounds + 1)][1:]
    except RuntimeError as error:  # a backward that torch can't split: a run would say so
        if refusal_of(error, who="this model", doing="backward") is not None:
            raise  # no room is no answer
        return SplitBackwardCost()
    if not all(taken):
        return SplitBackwardCost()
    kept = amount_of([unit.saved_bytes for unit in profile.units], 1, len(profile.units) - 1)
    held = max(0.0, taken[0][3] / kept) if kept else 0.0
    return SplitBackwardCost(*_factors([one[:3] for one in taken], inputs_s, weights_s), held)


def _factors(taken: Sequence[tuple[float, ...]], inputs_s: float, weights_s: float) -> tuple[float, float]:
    """From rounds of whole, first and second half, and the profile's parts of the whole."""
    whole_s, first_s, second_s = (min(times) for times in zip(*taken, strict=True))
    scale = whole_s / (inputs_s + weights_s)
    return first_s / (inputs_s * scale), second_s / (weights_s * scale)


def _round(graph: UnitGraph, model: Model) -> tuple[float, ...]:
    """Seconds of the whole backward and of both halves, and bytes that come to be held between these.

    () where no gradient travels back to the first unit.
    """
    parameters = [one for one in model.module.parameters() if one.requires_grad]
    with torch.no_grad():
        crossing = graph.stage(0, 0)(*graph.flatten(model.args, model.kwargs))
    stage = graph.stage(1, len(graph.calls) - 1)
    found: list[float] = []
    place = parameters[0].device
    stopwatch = Stopwatch(place)
    for split in (False, True):
        values = [
            value.detach().requires_grad_() if needed else value
            for value, needed in zip(crossing, graph.needs_gradient(0), strict=True)
        ]
        with torch.enable_grad():
            outputs = [one.clone() for one in stage(*values) if isinstance(one, torch.Tensor) and one.requires_grad]
        held = BackwardState([one for one in values if isinstance(one, torch.Tensor) and one.requires_grad], list(outputs))
        given = [torch.ones_like(one) for one in outputs]
        if not held.inputs or not outputs:
            return ()
        calls: list[Callable[[], object]] = [partial(run_backward, held, given)]
        if split:
            calls = [partial(run_input_backward, held, given, parameters), partial(run_weight_backward, held, parameters)]
        before = _allocated(place)
        for call in calls:
            results, seconds = stopwatch.time([call])
            found.append(seconds)
            if len(found) == 2:  # after the first half; the inputs' gradients travel on
                travels = sum(one.numel() * one.element_size() for one in results[0])  # type: ignore[attr-defined]
                held_bytes = _allocated(place) - before - travels
            del results
        for one in parameters:
            one.grad = None
    return *found, held_bytes


def _allocated(place: torch.device) -> int:
    """Bytes that a GPU's allocator has given out; 0 on a CPU, which does not tell."""
    return int(torch.cuda.memory_allocated(place)) if place.type == "cuda" else 0
