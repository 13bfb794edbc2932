"""What it costs to do a backward pass in two halves, as zero-bubble schedules do: more than the same in one piece.

    in one piece   ◄─── all gradients ───              a unit's profile has this, and the inputs' part of it; the rest
    in halves      ◄── inputs' gradients ──  ◄ weights' ►     counts as the weights', as if halving cost nothing

torch walks the graph to find what the weights hang on, keeps it, and begins anew for each group of weights. So both
halves are measured as the engine does them, on the model behind its first unit, beside the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from stagewright.capture.graph import UnitGraph
from stagewright.engine.backward import Held, backward_inputs, backward_weights, backward_whole
from stagewright.profile.replay import Stopwatch
from stagewright.profile.value import Profile
from stagewright.zoo.model import Model

__all__ = ["split_factors"]


def split_factors(graph: UnitGraph, model: Model, profile: Profile, rounds: int) -> tuple[float, float]:
    """How much longer each half takes than the profile's units say: of the inputs' gradients, of the weights'.

    The shortest of some rounds, for a ratio of two of them is spoilt by anything that disturbs one.
    """
    units = profile.units[1:]
    inputs_s = sum(unit.backward_input.median_s for unit in units)
    weights_s = sum(unit.backward_weight.median_s for unit in units)
    if not inputs_s or not weights_s:
        return 1.0, 1.0
    try:
        taken = [_round(graph, model) for _ in range(rounds + 1)][1:]
    except RuntimeError:  # a backward that torch can't split: a run would say so
        return 1.0, 1.0
    return _factors(taken, inputs_s, weights_s) if all(taken) else (1.0, 1.0)


def _factors(taken: Sequence[tuple[float, ...]], inputs_s: float, weights_s: float) -> tuple[float, float]:
    """From rounds of whole, first and second half, and the profile's parts of the whole."""
    whole_s, first_s, second_s = (min(times) for times in zip(*taken, strict=True))
    scale = whole_s / (inputs_s + weights_s)
    return first_s / (inputs_s * scale), second_s / (weights_s * scale)


def _round(graph: UnitGraph, model: Model) -> tuple[float, ...]:
    """Seconds of the whole backward and of both halves; () where no gradient travels back to the first unit."""
    parameters = [one for one in model.module.parameters() if one.requires_grad]
    with torch.no_grad():
        crossing = graph.stage(0, 0)(*graph.flatten(model.args, model.kwargs))
    stage = graph.stage(1, len(graph.calls) - 1)
    found: list[float] = []

    stopwatch = Stopwatch(parameters[0].device)
    for split in (False, True):
        values = [
            value.detach().requires_grad_() if needed else value
            for value, needed in zip(crossing, graph.needs_gradient(0), strict=True)
        ]
        with torch.enable_grad():
            outputs = [one.clone() for one in stage(*values) if isinstance(one, torch.Tensor) and one.requires_grad]
        held = Held([one for one in values if isinstance(one, torch.Tensor) and one.requires_grad], list(outputs))
        given = [torch.ones_like(one) for one in outputs]
        if not held.inputs or not outputs:
            return ()
        calls: list[Callable[[], object]] = [partial(backward_whole, held, given)]
        if split:
            calls = [partial(backward_inputs, held, given, parameters), partial(backward_weights, held, parameters)]
        found += [stopwatch.time([call])[1] for call in calls]
        for one in parameters:
            one.grad = None
    return tuple(found)
