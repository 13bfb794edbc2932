"""Glue operations between units, run alone like units: their times and memory count for a unit of the same stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from stagewright.graph.preserve import preserved
from stagewright.profiler.replay import Replay
from stagewright.profiler.storage import tensors_in

if TYPE_CHECKING:
    from stagewright.graph.unit_graph import UnitGraph


@dataclass(frozen=True, slots=True)
class GlueReplay:
    """A segment of glue operations."""

    unit: int
    """Index of the unit that it counts for."""
    is_after: bool
    """Whether it runs after that unit, not before it."""
    replay: Replay


def glue_replays(
    graph: UnitGraph, args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool
) -> list[GlueReplay]:
    """Return the segments of glue operations."""
    segments = []
    with torch.set_grad_enabled(training), preserved(graph.model):
        for segment in graph.record_glue(tuple(args), dict(kwargs)):
            needs = [tensor.requires_grad for tensor in tensors_in((segment.args, {}))]
            name = f"{'after' if segment.is_after else 'before'} {graph.calls[segment.unit].name}"
            replay = Replay(name, segment.module, segment.args, {}, training=training, needs_gradient=needs)
            segments.append(GlueReplay(segment.unit, segment.is_after, replay))
    return segments


def add_glue_memory(
    working: Sequence[tuple[int, int]], replays: Sequence[Replay], glue: Sequence[GlueReplay], device: torch.device
) -> list[tuple[int, int]]:
    """Raise the working memory of units to that of their glue operations, such as a loss behind the last unit.

    Backward starts with the glue behind a unit, when the gradient of the unit's output does not exist yet.
    """
    raised = list(working)
    for segment in glue:
        forward, backward = raised[segment.unit]
        own_forward, own_backward = segment.replay.working_bytes(device)
        output = replays[segment.unit].output_bytes
        raised[segment.unit] = (
            forward + own_forward if segment.is_after else max(forward, own_forward),
            max(backward, own_backward - output),
        )
    return raised
