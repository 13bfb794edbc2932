"""Replay of a finished run: its metrics and recorded events on one time axis.

    metrics lines   ├── step 1 ──┤├─ step 2 ─┤├ evaluation ┤├── step 3 ──┤   back to back, in real length
    events          │F F B B opt ││F F B B … │              │             │    each inside its step
                    0 s                                                   ► seconds of the replay

Time before and between steps (startup, capture, checkpoints) is skipped. Pure except for ``read_replay``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from stagewright.engine.worker.faults import Doing, Fault, worker_folder
from stagewright.errors import UsageError
from stagewright.report.live.changes import (
    MAX_DURATION_S,
    ActivitySeen,
    Change,
    FaultSeen,
    MetricsLine,
    PlanRead,
    ResultRead,
    read_count,
    read_duration_s,
)
from stagewright.report.live.fold import fold
from stagewright.report.live.state import LiveState
from stagewright.runs.run_folder import RunFolder
from stagewright.trace.events import Trace, TraceEvent
from stagewright.trace.read import read_trace

# Which stream is shown when several are active, most important first; sends are not shown.
_STREAMS = ("receive", "compute", "collective")
_step = attrgetter("step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A change with its time on the replay's axis."""

    at_s: float
    change: Change


class Replay:
    """Cursor over the moments of a run; moving backward restarts from the beginning."""

    def __init__(self, plan: PlanRead, moments: Sequence[Moment], end: Sequence[Change]) -> None:
        self.plan = plan
        self.moments = moments
        self.end = end
        """Changes after the last moment: faults and the result."""
        self.length_s = moments[-1].at_s if moments else 0.0
        self._state = self._begin()
        self._next, self._at_s, self._ended = 0, 0.0, False

    def state_at(self, at_s: float) -> LiveState:
        """Return the state at a time; from the length on, the final state."""
        if at_s < self._at_s:
            self._state = self._begin()
            self._next, self._ended = 0, False
        self._at_s = at_s
        while self._next < len(self.moments) and self.moments[self._next].at_s <= at_s:
            self._state = fold(self._state, self.moments[self._next].change)
            self._next += 1
        if at_s >= self.length_s and not self._ended:
            self._ended = True
            for change in self.end:
                self._state = fold(self._state, change)
        return self._state

    def _begin(self) -> LiveState:
        # The replay's time is not the time of day.
        return fold(LiveState(name=self.plan.name), replace(self.plan, begun=None))


def read_replay(folder: RunFolder) -> Replay:
    """Read a run folder as moments."""
    plan = folder.plan()
    try:
        trace = read_trace(folder)
    except UsageError:
        trace = None  # replay the metrics alone
    lines = [list(folder.metrics(rank)) for rank in range(plan.mesh.num_workers)]
    faults = [Fault.read(worker_folder(folder.path, rank) / "error.json") for rank in range(plan.mesh.num_workers)]
    verdict = Fault.read(folder.path / "fault.json")
    result = folder.result()
    end: list[Change] = [FaultSeen(fault=fault) for fault in faults if fault is not None]
    end += [FaultSeen(fault=verdict, verdict=True)] if verdict is not None else []
    end += [ResultRead(result=replace(result, ended=None))] if result is not None else []
    return Replay(PlanRead(name=folder.name, plan=plan), make_moments(lines, trace), end)


def make_moments(lines: Sequence[Sequence[Mapping[str, Any]]], trace: Trace | None) -> tuple[Moment, ...]:
    """Order metrics lines and events by time; the worker with the most lines sets the pace."""
    if not any(lines):
        return ()
    lead = max(range(len(lines)), key=lambda rank: (len(lines[rank]), -rank))
    moments: list[Moment] = []
    starts: dict[int, float] = {}
    clock = 0.0
    for index, line in enumerate(lines[lead]):
        number = read_count(line, "step")
        if number is not None and read_duration_s(line, "seconds") is not None:
            # Training counts completed steps.
            starts[number - (line.get("kind") == "step")] = clock
        clock += _duration_s(line)
        moments += [
            Moment(at_s=clock, change=MetricsLine(rank=rank, values=worker_lines[index]))
            for rank, worker_lines in enumerate(lines)
            if index < len(worker_lines)
        ]
    spans = trace.spans if trace is not None else {}
    for count, (step, at_s) in enumerate(starts.items(), start=1):
        if step not in spans:  # without events only the step is known
            doing = Doing(count=count, step=step, action="step")
            moments += [
                Moment(at_s=at_s, change=ActivitySeen(rank=rank, doing=doing, at_s=at_s)) for rank in range(len(lines))
            ]
    for worker in trace.workers if trace is not None else ():
        for step, events in groupby(sorted(worker.events, key=_step), key=_step):
            if step in spans and step in starts:
                moments += _activity_moments(worker.rank, step, events, starts[step] - spans[step][0])
    return tuple(sorted(moments, key=lambda moment: moment.at_s))


def _duration_s(line: Mapping[str, Any]) -> float:
    """Return the time that a metrics line covers; a line of a measurement may cover several batches."""
    kind = line.get("kind")
    if kind == "epoch":
        return read_duration_s(line, "evaluation_s") or 0.0
    batches = (read_count(line, "batches") or 1) if kind is None else 1
    return min(MAX_DURATION_S, (read_duration_s(line, "seconds") or 0.0) * batches)


def _activity_moments(rank: int, step: int, events: Iterable[TraceEvent], offset_s: float) -> list[Moment]:
    """Return a worker's activity at each start and end of its events: the innermost active one, or nothing."""
    shown = [event for event in events if event.stream in _STREAMS and event.kind != "step"]
    edges = sorted({time for event in shown for time in (event.start_s, event.end_s)})
    moments: list[Moment] = []
    active: list[TraceEvent] = []
    waiting = sorted(shown, key=lambda event: (event.start_s, -event.end_s), reverse=True)
    for count, time in enumerate(edges, start=1):
        active = [event for event in active if event.end_s > time]
        while waiting and waiting[-1].start_s <= time:
            active.append(waiting.pop())
        current = min(reversed(active), key=lambda event: _STREAMS.index(event.stream), default=None)
        doing = Doing(count=(step + 1) * 1_000_000 + count, step=step)
        if current is not None:
            doing = replace(doing, stage=current.stage, microbatch=current.microbatch, action=current.kind)
        at_s = time + offset_s
        moments.append(Moment(at_s=at_s, change=ActivitySeen(rank=rank, doing=doing, at_s=at_s)))
    return moments
