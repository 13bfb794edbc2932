"""Schedules of a pipeline in closed form: the bubble, and the micro-batches in flight.

gpipe, 1f1b            every other rank delays the step by one micro-batch
interleaved,           by one of its v stages; with fewer micro-batches than ranks, each stage waits for the
looped-bfs             micro-batches to come round
zero bubble            weight gradients fill the drain
"""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.analytic.layout import Layout
from stagewright.analytic.rank_time import RankTime
from stagewright.schedules.rules import SCHEDULES


def bubble_s(layout: Layout, times: Sequence[RankTime], slowest: int) -> float:
    """Return how long the slowest rank waits in a step: warm-up, drain, and rounds with too few micro-batches."""
    splits = SCHEDULES[layout.schedule].splits_backward
    fills = [time.fill_s - (min(2 * time.weight_s, time.backward_s) if splits else 0.0) for time in times]
    ahead = (sum(fills) - fills[slowest]) / layout.virtual
    if layout.virtual == 1 or layout.microbatches >= layout.pipeline:
        return ahead
    # p · v + m − 1 stages of a micro-batch, instead of m · v + p − 1.
    return ahead + (layout.pipeline - layout.microbatches) * times[slowest].total_s * (1 - 1 / layout.virtual)


def in_flight(layout: Layout, rank: int) -> float:
    """Return the micro-batches whose activations a rank holds at once."""
    micro, ranks, virtual = layout.microbatches, layout.pipeline, layout.virtual
    if layout.schedule in ("gpipe", "looped-bfs"):
        return micro
    if layout.schedule in ("zbv", "dualpipev"):
        return min(micro, ranks + (0.5 if layout.schedule == "dualpipev" else 0.0))
    if virtual == 1:
        return min(micro, ranks - rank)
    chunks = min(micro * virtual, 2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1)
    return chunks / virtual
