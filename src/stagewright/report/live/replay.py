"""A finished run, moment by moment: its metrics and, where workers recorded them, its events on one time axis.

    lines of metrics   ├── step 1 ──┤├─ step 2 ─┤├ evaluation ┤├── step 3 ──┤   one after the other, in full length
    events             │F F B B opt ││F F B B … │              │             │    each inside its own step
                       0 s                                                   ► seconds of the replay

What lay before and between the steps (start, capture, checkpoints) takes no time here. Pure but for ``read_replay``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from stagewright.engine.worker.faults import Doing, Fault, worker_folder
from stagewright.errors import UsageError
from stagewright.report.live.state import Change, Ended, Failed, Line, LiveState, PlanKnown, Seen, fold, number_of
from stagewright.runs.run_folder import RunFolder
from stagewright.trace.events import Trace, TraceEvent
from stagewright.trace.read import read_trace

__all__ = ["Moment", "Replay", "moments", "read_replay"]

# What is shown where several go on at once; what a worker only hands over is not shown.
_FIRST = ("receive", "compute", "collective")
_step = attrgetter("step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that became known."""

    at_s: float
    """When, on the replay's axis."""
    change: Change
    """What."""


class Replay:
    """Goes through the moments of a run; forward costs only what is passed, back begins anew."""

    def __init__(self, known: PlanKnown, story: Sequence[Moment], end: Sequence[Change]) -> None:
        self.known = known
        self.story = story
        self.end = end
        """What is told when the last moment has passed: faults and the result."""
        self.length_s = story[-1].at_s if story else 0.0
        self._state = self._begin()
        self._next, self._at_s, self._ended = 0, 0.0, False

    def at(self, at_s: float) -> LiveState:
        """The state at a time, from 0 to the length; after it, the end."""
        if at_s < self._at_s:
            self._state = self._begin()
            self._next, self._ended = 0, False
        self._at_s = at_s
        while self._next < len(self.story) and self.story[self._next].at_s <= at_s:
            self._state = fold(self._state, self.story[self._next].change)
            self._next += 1
        if at_s >= self.length_s and not self._ended:
            self._ended = True
            for change in self.end:
                self._state = fold(self._state, change)
        return self._state

    def _begin(self) -> LiveState:
        return fold(LiveState(name=self.known.name), replace(self.known, begun=None))  # its time is not the time of day


def read_replay(folder: RunFolder) -> Replay:
    """All that a run folder has, as moments."""
    plan = folder.plan()
    try:
        trace = read_trace(folder)
    except UsageError:
        trace = None  # then from the metrics alone
    lines = [list(folder.metrics(rank)) for rank in range(plan.mesh.num_workers)]
    faults = [Fault.read(worker_folder(folder.path, rank) / "error.json") for rank in range(plan.mesh.num_workers)]
    verdict = Fault.read(folder.path / "fault.json")
    result = folder.result()
    end: list[Change] = [Failed(fault=fault) for fault in faults if fault is not None]
    end += [Failed(fault=verdict, verdict=True)] if verdict is not None else []
    end += [Ended(result=replace(result, ended=None))] if result is not None else []
    return Replay(PlanKnown(name=folder.name, plan=plan), moments(lines, trace), end)


def moments(lines: Sequence[Sequence[Mapping[str, Any]]], trace: Trace | None) -> tuple[Moment, ...]:
    """The story of a run, by time; the worker with most lines sets the pace."""
    if not any(lines):
        return ()
    lead = max(range(len(lines)), key=lambda rank: (len(lines[rank]), -rank))
    found: list[Moment] = []
    starts: dict[int, float] = {}
    clock = 0.0
    for place, line in enumerate(lines[lead]):
        step = number_of(line, "step")
        if step is not None and number_of(line, "seconds") is not None:
            starts[int(step) - (line.get("kind") == "step")] = clock  # training counts steps that are done
        clock += _took(line)
        found += [
            Moment(at_s=clock, change=Line(rank=rank, values=own[place]))
            for rank, own in enumerate(lines)
            if place < len(own)
        ]
    spans = trace.spans if trace is not None else {}
    for place, (number, at_s) in enumerate(starts.items(), start=1):
        if number not in spans:  # no more is known than which step the workers are at
            doing = Doing(count=place, step=number, action="step")
            found += [Moment(at_s=at_s, change=Seen(rank=rank, doing=doing, at_s=at_s)) for rank in range(len(lines))]
    for worker in trace.workers if trace is not None else ():
        for number, events in groupby(sorted(worker.events, key=_step), key=_step):
            if number in spans and number in starts:
                found += _doings(worker.rank, number, events, starts[number] - spans[number][0])
    return tuple(sorted(found, key=lambda one: one.at_s))


def _took(line: Mapping[str, Any]) -> float:
    """How long what a line tells of took; a measurement's line may be of several batches."""
    kind = line.get("kind")
    if kind == "epoch":
        return number_of(line, "evaluation_s") or 0.0
    batches = (number_of(line, "batches") or 1) if kind is None else 1
    return (number_of(line, "seconds") or 0.0) * batches


def _doings(rank: int, step: int, events: Iterable[TraceEvent], offset_s: float) -> list[Moment]:
    """What a worker does at each begin and end of its events: the innermost one that goes on, or nothing."""
    listed = [one for one in events if one.stream in _FIRST and one.kind != "step"]
    edges = sorted({time for one in listed for time in (one.start_s, one.end_s)})
    found: list[Moment] = []
    open_now: list[TraceEvent] = []
    waiting = sorted(listed, key=lambda one: (one.start_s, -one.end_s), reverse=True)
    for count, time in enumerate(edges, start=1):
        open_now = [one for one in open_now if one.end_s > time]
        while waiting and waiting[-1].start_s <= time:
            open_now.append(waiting.pop())
        shown = min(reversed(open_now), key=lambda one: _FIRST.index(one.stream), default=None)
        doing = Doing(count=(step + 1) * 1_000_000 + count, step=step)
        if shown is not None:
            doing = replace(doing, stage=shown.stage, microbatch=shown.microbatch, action=shown.kind)
        at_s = time + offset_s
        found.append(Moment(at_s=at_s, change=Seen(rank=rank, doing=doing, at_s=at_s)))
    return found
