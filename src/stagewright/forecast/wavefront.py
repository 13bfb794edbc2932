"""The longest path of plain GPipe and 1F1B for pipelines too large, or candidates too many, to list every node.

    tick           0   1   2   3   4   5   6   7        the tick of an action follows from stage i, micro-batch k:
    stage 0        F0  F1  F2  ·   ·   B0  F3 …         GPipe   F: i + k         B: m + 2(p−1) − i + k
    stage 1            F0  F1  ·   B0  F2  B1           1F1B    F: i + k (warm-up), i + 2k     B: 2p − 1 − i + 2k
    stage 2                F0  B0  F1  B1               so one tick of all stages is one step over arrays

The same edges as in `order`, without a list of nodes; a test holds both equal. Candidates lie along the last axis, so
that a thousand plans of one shape cost little more than one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stagewright.forecast.order import AHEAD, Floats, Integers

__all__ = ["PipelineTimes", "plain_pipeline"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineTimes:
    """When everything happens; [stage, micro-batch, …candidates], or only the ends where no history was asked for."""

    # When the last action of each stage ends; [stage, …].
    end_s: Floats
    # Starts of forwards and backwards.
    forward_start_s: Floats | None = None
    backward_start_s: Floats | None = None
    # Ends of forwards and backwards.
    forward_end_s: Floats | None = None
    backward_end_s: Floats | None = None

    @property
    def step_s(self) -> Floats:
        """The longest path; […]."""
        latest: Floats = self.end_s.max(axis=0)
        return latest


def plain_pipeline(
    schedule: str,
    num_microbatches: int,
    forward_s: Floats,
    backward_s: Floats,
    forward_link_s: Floats,
    backward_link_s: Floats,
    *,
    backward_first_s: Floats | None = None,
    backward_last_s: Floats | None = None,
    history: bool = False,
) -> PipelineTimes:
    """Times of one stage a worker, in order. Durations are [stages, …], of links [stages − 1, …].

    ``backward_first_s``: of the first micro-batch, whose gradients are added to none; ``backward_last_s``: of the last,
    where it is not recomputed.
    """
    assert schedule in ("gpipe", "1f1b")
    runner = _Wavefront(forward_s, backward_s, forward_link_s, backward_link_s, num_microbatches, history)
    runner.backward_first_s = backward_s if backward_first_s is None else backward_first_s
    runner.backward_last_s = backward_s if backward_last_s is None else backward_last_s
    p, m = len(forward_s), num_microbatches
    stages = np.arange(p)
    warm = np.minimum(m, p - 1 - stages)
    last_tick = m + 2 * (p - 1) + m if schedule == "gpipe" else 2 * p - 1 + 2 * (m - 1)
    for tick in range(last_tick + 1):
        if schedule == "gpipe":
            forward, backward = tick - stages, tick - (m + 2 * (p - 1) - stages)
        else:
            first = tick - stages
            even = (first & 1) == 0
            half = first >> 1
            forward = np.where(first < warm, first, np.where(even & (half >= warm), half, -1))
            late = tick - (2 * p - 1 - stages)
            backward = np.where((late & 1) == 0, late >> 1, -1)
        who = np.flatnonzero((forward >= 0) & (forward < m))
        if len(who):
            runner.forward(who, forward[who])
        who = np.flatnonzero((backward >= 0) & (backward < m))
        if len(who):
            runner.backward(who, backward[who])
    return runner.result()


class _Wavefront:
    """What is known at a tick: when each worker is free, and the latest messages of each edge."""

    def __init__(
        self, forward_s: Floats, backward_s: Floats, ahead_s: Floats, back_s: Floats, m: int, keep: bool
    ) -> None:
        self.forward_s, self.backward_s = forward_s, backward_s
        self.backward_first_s, self.backward_last_s = backward_s, backward_s
        p, rest = len(forward_s), forward_s.shape[1:]
        none = np.zeros((1, *rest))
        # Row i: the edge into stage i from before (forward) and from behind (backward).
        self.into_s = np.concatenate([none, ahead_s])
        self.back_into_s = np.concatenate([back_s, none])
        self.m, self.p = m, p
        self.free = np.zeros((p, *rest))
        self.edge = np.zeros((2, p, *rest))
        # When the stages took their latest AHEAD messages, by the parity of the micro-batch.
        self.taken = np.zeros((2, AHEAD, p, *rest))
        # Ends of actions until the neighbour needs them: as many micro-batches as may be on their way.
        self.forward_end = np.zeros((m, p, *rest))
        self.backward_end = np.zeros((m, p, *rest))
        self.starts = (np.zeros((m, p, *rest)), np.zeros((m, p, *rest))) if keep else None

    def forward(self, who: Integers, k: Integers) -> None:
        begin = self.free[who]
        if who[-1] > 0:
            inner = who > 0
            at, chunk = who[inner], k[inner]
            begin[inner] = np.maximum(begin[inner], self._arrival(0, at, chunk, self.forward_end[chunk, at - 1]))
        if self.starts is not None:
            self.starts[0][k, who] = begin
        self.taken[0, k % AHEAD, who] = begin
        self.free[who] = self.forward_end[k, who] = begin + self.forward_s[who]

    def backward(self, who: Integers, k: Integers) -> None:
        begin = self.free[who]
        if who[0] < self.p - 1:
            inner = who < self.p - 1
            at, chunk = who[inner], k[inner]
            begin[inner] = np.maximum(begin[inner], self._arrival(1, at, chunk, self.backward_end[chunk, at + 1]))
        if self.starts is not None:
            self.starts[1][k, who] = begin
        self.taken[1, k % AHEAD, who] = begin
        duration = self.backward_s[who]
        if k.min() == 0:
            duration[k == 0] = self.backward_first_s[who[k == 0]]
        if k.max() == self.m - 1:
            duration[k == self.m - 1] = self.backward_last_s[who[k == self.m - 1]]
        self.free[who] = self.backward_end[k, who] = begin + duration

    def _arrival(self, direction: int, at: Integers, k: Integers, made: Floats) -> Floats:
        """When a message is there: made, its edge free, its receive posted, then its own time."""
        begin = np.maximum(made, self.edge[direction, at])
        # The receive is posted when the message AHEAD before it was taken; its slot still holds that time.
        np.maximum(begin, self.taken[direction, k % AHEAD, at], out=begin)
        arrived: Floats = begin + (self.back_into_s if direction else self.into_s)[at]
        self.edge[direction, at] = arrived
        return arrived

    def result(self) -> PipelineTimes:
        if self.starts is None:
            return PipelineTimes(end_s=self.free)
        swapped = [np.swapaxes(one, 0, 1) for one in (*self.starts, self.forward_end, self.backward_end)]
        return PipelineTimes(
            end_s=self.free,
            forward_start_s=swapped[0],
            backward_start_s=swapped[1],
            forward_end_s=swapped[2],
            backward_end_s=swapped[3],
        )
