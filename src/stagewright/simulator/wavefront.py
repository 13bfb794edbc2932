"""The longest path of plain GPipe and 1F1B for pipelines too large, or candidates too many, to list every node.

    tick           0   1   2   3   4   5   6   7        the tick of an action follows from stage i, micro-batch k:
    stage 0        F0  F1  F2  ·   ·   B0  F3 …         GPipe   F: i + k         B: m + 2(p−1) − i + k
    stage 1            F0  F1  ·   B0  F2  B1           1F1B    F: i + k (warm-up), i + 2k     B: 2p − 1 − i + 2k
    stage 2                F0  B0  F1  B1               so one tick of all stages is one step over arrays

The actions of one tick lie on a line through (stage, micro-batch), so that arrays of them are strided views, never
gathered. The same edges as in `order`, without a list of nodes; a test holds both equal. Candidates lie along the last
axis, so that a thousand plans of one shape cost little more than one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stagewright.simulator.action_graph import AHEAD, Floats

__all__ = ["WavefrontTimes", "simulate_wavefront"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WavefrontTimes:
    """When everything happens; [stage, micro-batch, …candidates], or only the ends where no history was asked for."""

    end_s: Floats
    """When the last action of each stage ends; [stage, …]."""
    forward_start_s: Floats | None = None
    """Starts of forwards and backwards."""
    backward_start_s: Floats | None = None
    forward_end_s: Floats | None = None
    """Ends of forwards and backwards."""
    backward_end_s: Floats | None = None
    forward_arrival_s: Floats | None = None
    """When what a stage needs of the one before it (forward) or behind it (backward) is there; 0 where it needs
    nothing."""
    backward_arrival_s: Floats | None = None

    @property
    def step_s(self) -> Floats:
        """The longest path; […]."""
        latest: Floats = self.end_s.max(axis=0)
        return latest


def simulate_wavefront(
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
) -> WavefrontTimes:
    """StepTimes of one stage a worker, in order. Durations are [stages, …], of links [stages − 1, …].

    ``backward_first_s``: of the first micro-batch, whose gradients are added to none; ``backward_last_s``: of the last,
    where it is not recomputed.
    """
    assert schedule in ("gpipe", "1f1b")
    p, m = len(forward_s), num_microbatches
    wave = _Wavefront(forward_s, backward_s, forward_link_s, backward_link_s, m, history=history)
    wave.first_s = backward_s if backward_first_s is None else backward_first_s
    wave.last_s = backward_s if backward_last_s is None else backward_last_s
    for line in _gpipe(p, m) if schedule == "gpipe" else _one_forward_one_backward(p, m):
        wave.run(line)
    return wave.result()


@dataclass(frozen=True, slots=True)
class _Line:
    """Actions of one tick: stages first, first + step, …, and micro-batches that rise or fall by one along them."""

    is_forward: bool
    first: int
    step: int
    count: int
    chunk: int
    slope: int


def _gpipe(p: int, m: int) -> Iterator[_Line]:
    for tick in range(m + p - 1):
        low = max(0, tick - m + 1)
        yield _Line(True, low, 1, min(p - 1, tick) - low + 1, tick - low, -1)
    for tick in range(m + p - 1):  # the last stage begins, at micro-batch `tick`
        high = p - 1 - max(0, tick - m + 1)
        low = p - 1 - min(p - 1, tick)
        yield _Line(False, low, 1, high - low + 1, tick - (p - 1 - low), 1)


def _one_forward_one_backward(p: int, m: int) -> Iterator[_Line]:
    for tick in range(2 * p - 1 + 2 * m):
        if tick < p - 1:  # warm-up: every stage that is reached goes on
            low = max(0, tick - m + 1)
            if low <= tick:
                yield _Line(True, low, 1, tick - low + 1, tick - low, -1)
        low = max(2 * (p - 1) - tick, tick - 2 * (m - 1), 0)
        low += (tick - low) % 2
        if low < p:
            yield _Line(True, low, 2, (p - 1 - low) // 2 + 1, (tick - low) // 2, -1)
        low = max(2 * p - 1 - tick, 0)
        low += (tick - (2 * p - 1 - low)) % 2
        high = min(p - 1, 2 * p - 1 - tick + 2 * (m - 1))
        if low <= high:
            yield _Line(False, low, 2, (high - low) // 2 + 1, (tick - (2 * p - 1 - low)) // 2, 1)


class _Wavefront:
    """What is known at a tick: when each worker is free, and starts and ends of all that was done.

    Starts and ends are flat, micro-batch after micro-batch, with AHEAD micro-batches of zeros before the first: a line
    is a slice of them, and what was taken AHEAD before is the same slice, so many rows above.
    """

    def __init__(
        self, forward_s: Floats, backward_s: Floats, ahead_s: Floats, back_s: Floats, m: int, *, history: bool
    ) -> None:
        self.forward_s, self.backward_s, self.first_s, self.last_s = forward_s, backward_s, backward_s, backward_s
        p, rest = len(forward_s), forward_s.shape[1:]
        none = np.zeros((1, *rest))
        # Row i: the edge into stage i, from before and from behind.
        self.into_s = np.concatenate([none, ahead_s]), np.concatenate([back_s, none])
        self.m, self.p = m, p
        self.free = np.zeros((p, *rest))
        self.edge = np.zeros((2, p, *rest))
        self.starts = np.zeros((2, (m + AHEAD) * p, *rest))
        self.ends = np.zeros((2, (m + AHEAD) * p, *rest))
        self.arrivals = np.zeros((2, (m + AHEAD) * p, *rest)) if history else None

    def _cells(self, line: _Line, skip: int, above: int, aside: int) -> slice:
        """The line without its first ``skip`` actions, so many micro-batches above and stages aside."""
        stride = line.slope * self.p + line.step
        begin = (line.chunk + AHEAD - above) * self.p + line.first + aside + skip * stride
        count = line.count - skip
        if count == 1 or stride == 0:
            return slice(begin, begin + 1)
        stop = begin + stride * count
        return slice(begin, stop if stop >= 0 else None, stride)

    def run(self, line: _Line) -> None:
        which = 0 if line.is_forward else 1
        stages = slice(line.first, line.first + line.step * (line.count - 1) + 1, line.step)
        begin = self.free[stages].copy()
        # The first stage receives nothing forward, the last nothing backward.
        ends_at_last = not line.is_forward and line.first + line.step * (line.count - 1) == self.p - 1
        skip = 1 if line.is_forward and line.first == 0 else 0
        inner = line if not ends_at_last else _shortened(line)
        if inner.count > skip:
            at = slice(inner.first + skip * inner.step, inner.first + inner.step * (inner.count - 1) + 1, inner.step)
            made = self.ends[which, self._cells(inner, skip, 0, -1 if line.is_forward else 1)]
            arrival = np.maximum(made, self.edge[which, at])
            np.maximum(arrival, self.starts[which, self._cells(inner, skip, AHEAD, 0)], out=arrival)
            arrival += self.into_s[which][at]
            self.edge[which, at] = arrival
            if self.arrivals is not None:
                self.arrivals[which, self._cells(inner, skip, 0, 0)] = arrival
            part = begin[skip : inner.count]
            np.maximum(part, arrival, out=part)
        cells = self._cells(line, 0, 0, 0)
        self.starts[which, cells] = begin
        end = begin
        end += (self.forward_s if line.is_forward else self.backward_s)[stages]
        if not line.is_forward:
            self._correct(line, end)
        self.free[stages] = end
        self.ends[which, cells] = end

    def _correct(self, line: _Line, end: Floats) -> None:
        """The first and the last micro-batch's backward may take another time; micro-batches rise along the line."""
        for chunk, other in ((0, self.first_s), (self.m - 1, self.last_s)):
            at = chunk - line.chunk
            if 0 <= at < line.count and other is not self.backward_s and not (chunk == 0 == self.m - 1):
                stage = line.first + line.step * at
                end[at] += other[stage] - self.backward_s[stage]
        if self.m == 1 and line.chunk == 0:
            stage = line.first
            end[0] += self.last_s[stage] - self.backward_s[stage]

    def result(self) -> WavefrontTimes:
        if self.arrivals is None:
            return WavefrontTimes(end_s=self.free)
        shape = (self.m, self.p, *self.free.shape[1:])
        known = (self.starts, self.ends, self.arrivals)
        found = [one[which, AHEAD * self.p :].reshape(shape) for one in known for which in (0, 1)]
        swapped = [np.swapaxes(one, 0, 1) for one in found]
        return WavefrontTimes(
            end_s=self.free,
            forward_start_s=swapped[0],
            backward_start_s=swapped[1],
            forward_end_s=swapped[2],
            backward_end_s=swapped[3],
            forward_arrival_s=swapped[4],
            backward_arrival_s=swapped[5],
        )


def _shortened(line: _Line) -> _Line:
    """The line without its last action."""
    return _Line(line.is_forward, line.first, line.step, line.count - 1, line.chunk, line.slope)
