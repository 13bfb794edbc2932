"""The whole model as it runs: eager, or as one compiled stage to which the times of its units are scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stagewright.graph.compilation import compile_stage
from stagewright.profiler.profile import UnitProfile
from stagewright.profiler.replay import Replay, scale_time
from stagewright.zoo.loss import find_model_loss

if TYPE_CHECKING:
    from stagewright.graph.unit_graph import UnitGraph


def whole_replay(
    graph: UnitGraph, args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool, as_stage: bool
) -> Replay:
    """Return the whole model, or the whole graph as one compiled stage."""
    name = "whole model"
    if not as_stage:
        return Replay(name, graph.model, args, kwargs, training=training, is_whole=True, results=loss_or_output)
    stage = graph.stage(0, len(graph.calls) - 1)
    values = graph.flatten(tuple(args), dict(kwargs))
    replay = Replay(  # inspects the eager stage
        name,
        stage,
        values,
        {},
        training=training,
        is_whole=True,
        results=lambda outputs: loss_or_output(graph.unflatten(outputs)),
    )
    compile_stage(stage)
    return replay


def loss_or_output(output: Any) -> Any:
    """Return where backward starts: the loss that the model computes itself, or else all of its output."""
    loss = find_model_loss(output)
    return output if loss is None else loss


def scale_units(units: tuple[UnitProfile, ...], forward_s: float, backward_s: float) -> tuple[UnitProfile, ...]:
    """Scale the times of all units so that they add up to those of one compiled stage."""
    forward = _ratio(forward_s, sum(unit.forward.median_s for unit in units))
    sums = (unit.backward_input.median_s + unit.backward_weight.median_s for unit in units)
    backward = _ratio(backward_s, sum(sums))
    return tuple(
        replace(
            unit,
            forward=scale_time(unit.forward, forward),
            backward_input=scale_time(unit.backward_input, backward),
            backward_weight=scale_time(unit.backward_weight, backward),
        )
        for unit in units
    )


def _ratio(actual: float, total: float) -> float:
    return actual / total if actual and total else 1.0
