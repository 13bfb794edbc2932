"""The longest path of GPipe and 1F1B with one stage per worker, for pipelines too large for an action graph.

    tick           0   1   2   3   4   5   6   7        the tick of an action depends on stage i and micro-batch k:
    stage 0        F0  F1  F2  ·   ·   B0  F3 …         GPipe   F: i + k         B: m + 2(p−1) − i + k
    stage 1            F0  F1  ·   B0  F2  B1           1F1B    F: i + k (warm-up), i + 2k     B: 2p − 1 − i + 2k
    stage 2                F0  B0  F1  B1               so one tick of all stages is one array operation

The actions of one tick lie on a line through (stage, micro-batch), so they are strided views of the arrays. The
dependencies are those of `action_graph`; a test checks that both give equal times. Candidates lie along the last axis,
so a thousand plans of one shape cost little more than one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stagewright.simulator.action_graph import AHEAD, Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WavefrontTimes:
    """Times of all actions: [stage, micro-batch, …candidates], or only the ends without history."""

    end_s: Floats
    """End of the last action of each stage; [stage, …]."""
    forward_start_s: Floats | None = None
    backward_start_s: Floats | None = None
    forward_end_s: Floats | None = None
    backward_end_s: Floats | None = None
    forward_arrival_s: Floats | None = None
    """Arrival of a forward's input or a backward's gradient; 0 if it needs none."""
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
    """Compute the times with one stage per worker, in order. Durations are [stages, …], of links [stages − 1, …].

    ``backward_first_s``: for the first micro-batch, which does not accumulate gradients. ``backward_last_s``: for the
    last one, if it is not recomputed.
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
    """Actions of one tick: stages first, first + step, …, with micro-batches ascending or descending by one."""

    is_forward: bool
    first: int
    step: int
    count: int
    microbatch: int
    slope: int


def _gpipe(p: int, m: int) -> Iterator[_Line]:
    for tick in range(m + p - 1):
        low = max(0, tick - m + 1)
        yield _Line(True, low, 1, min(p - 1, tick) - low + 1, tick - low, -1)
    for tick in range(m + p - 1):  # the last stage starts, at micro-batch `tick`
        high = p - 1 - max(0, tick - m + 1)
        low = p - 1 - min(p - 1, tick)
        yield _Line(False, low, 1, high - low + 1, tick - (p - 1 - low), 1)


def _one_forward_one_backward(p: int, m: int) -> Iterator[_Line]:
    for tick in range(2 * p - 1 + 2 * m):
        if tick < p - 1:  # warm-up
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
    """The state at a tick: when each worker is free, and the starts and ends of all actions so far.

    Starts and ends are flat, ordered by micro-batch, with AHEAD micro-batches of zeros before the first. A line is a
    slice of them; the actions that posted its receives are the same slice, AHEAD micro-batches earlier.
    """

    def __init__(
        self, forward_s: Floats, backward_s: Floats, ahead_s: Floats, back_s: Floats, m: int, *, history: bool
    ) -> None:
        self.forward_s, self.backward_s, self.first_s, self.last_s = forward_s, backward_s, backward_s, backward_s
        p, rest = len(forward_s), forward_s.shape[1:]
        none = np.zeros((1, *rest))
        # Row i: the edge into stage i from the previous stage, and from the next.
        self.into_s = np.concatenate([none, ahead_s]), np.concatenate([back_s, none])
        self.m, self.p = m, p
        self.free = np.zeros((p, *rest))
        self.edge = np.zeros((2, p, *rest))
        self.starts = np.zeros((2, (m + AHEAD) * p, *rest))
        self.ends = np.zeros((2, (m + AHEAD) * p, *rest))
        self.arrivals = np.zeros((2, (m + AHEAD) * p, *rest)) if history else None

    def _cells(self, line: _Line, skip: int, earlier: int, stage_offset: int) -> slice:
        """Return the line without its first ``skip`` actions, shifted by micro-batches and stages."""
        stride = line.slope * self.p + line.step
        begin = (line.microbatch + AHEAD - earlier) * self.p + line.first + stage_offset + skip * stride
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
            receivers = slice(
                inner.first + skip * inner.step, inner.first + inner.step * (inner.count - 1) + 1, inner.step
            )
            produced = self.ends[which, self._cells(inner, skip, 0, -1 if line.is_forward else 1)]
            arrival = np.maximum(produced, self.edge[which, receivers])
            np.maximum(arrival, self.starts[which, self._cells(inner, skip, AHEAD, 0)], out=arrival)
            arrival += self.into_s[which][receivers]
            self.edge[which, receivers] = arrival
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
        """Correct the backward of the first and the last micro-batch; micro-batches ascend along the line."""
        for microbatch, backward_s in ((0, self.first_s), (self.m - 1, self.last_s)):
            index = microbatch - line.microbatch
            differs = backward_s is not self.backward_s and not (microbatch == 0 == self.m - 1)
            if 0 <= index < line.count and differs:
                stage = line.first + line.step * index
                end[index] += backward_s[stage] - self.backward_s[stage]
        if self.m == 1 and line.microbatch == 0:
            stage = line.first
            end[0] += self.last_s[stage] - self.backward_s[stage]

    def result(self) -> WavefrontTimes:
        if self.arrivals is None:
            return WavefrontTimes(end_s=self.free)
        shape = (self.m, self.p, *self.free.shape[1:])
        by_microbatch = [
            times[which, AHEAD * self.p :].reshape(shape)
            for times in (self.starts, self.ends, self.arrivals)
            for which in (0, 1)
        ]
        by_stage = [np.swapaxes(times, 0, 1) for times in by_microbatch]
        return WavefrontTimes(
            end_s=self.free,
            forward_start_s=by_stage[0],
            backward_start_s=by_stage[1],
            forward_end_s=by_stage[2],
            backward_end_s=by_stage[3],
            forward_arrival_s=by_stage[4],
            backward_arrival_s=by_stage[5],
        )


def _shortened(line: _Line) -> _Line:
    """Return the line without its last action."""
    return _Line(line.is_forward, line.first, line.step, line.count - 1, line.microbatch, line.slope)
