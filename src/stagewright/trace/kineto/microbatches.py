"""Which runs of compute are the micro-batches of a pipeline stage: those that fit between its messages.

    stage 0    ▕fwd 0▏send 0 ▕fwd 1▏send 1        receive 0▕bwd 0▏ receive 1▕bwd 1▏ ▕copies of gradients▏
    stage 1             receive 0▕fwd 0▏▕bwd 0▏send 0  receive 1▕fwd 1▏▕bwd 1▏send 1

A forward begins after its activation was received and ends before its own is sent; a backward likewise with gradients.
Of the runs that fit, the longest are taken: a script also computes before, between and after them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stagewright.trace.kineto.profile_file import CommunicationSpan, Phase

Run: TypeAlias = tuple[Phase, float, float, float]
"""Phase, start, end and time without gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A send or receive with its position in the pipeline."""

    span: CommunicationSpan
    peer: int | None
    content: str
    """activation or gradient."""
    microbatch: int


def number_microbatches(runs: Sequence[Run], messages: Iterable[Message]) -> dict[int, int]:
    """Return the micro-batch of each run that is one, by its index."""
    ends = {(m.content, m.span.name, m.microbatch): (m.span.start_s, m.span.end_s) for m in messages}
    count = 1 + max((number for _, _, number in ends), default=-1)
    numbers: dict[int, int] = {}
    for phase in ("forward", "backward"):
        own = [(index, run) for index, run in enumerate(runs) if run[0] == phase]
        limits = [_limits(phase, number, ends) for number in range(count)]
        numbers |= {
            own[position][0]: number for number, position in enumerate(_longest([run for _, run in own], limits))
        }
    return numbers


def _limits(phase: str, number: int, ends: dict[tuple[str, str, int], tuple[float, float]]) -> tuple[float, float]:
    """Return between which moments a micro-batch was computed."""

    def moment(content: str, name: str, default: float) -> float:
        span = ends.get((content, name, number))
        return default if span is None else span[name == "receive"]  # a send begins, a receive ends

    activation = [("activation", "receive"), ("activation", "send")]
    gradient = [("gradient", "receive"), ("gradient", "send")]
    before, after = (
        (activation[:1], [activation[1], *gradient])
        if phase == "forward"
        else ([*activation, gradient[0]], gradient[1:])
    )
    return max(moment(*key, -math.inf) for key in before), min(moment(*key, math.inf) for key in after)


def _longest(runs: Sequence[Run], limits: Sequence[tuple[float, float]]) -> list[int]:
    """Return one run for each micro-batch, in their order and within the limits, of the largest total time.

    Empty if there is none.
    """
    best: list[tuple[float, list[int]]] = [(0.0, [])]  # of the first micro-batches: total, indices
    best += [(-math.inf, []) for _ in limits]
    for position, (_, start, end, seconds) in enumerate(runs):
        for number in range(len(limits) - 1, -1, -1):
            begin_s, end_s = limits[number]
            total = best[number][0] + seconds
            if start >= begin_s and end <= end_s and total > best[number + 1][0]:
                best[number + 1] = (total, [*best[number][1], position])
    return best[-1][1]
