"""The event recorder of a worker, cheap enough to be always on.

    with recorder.step(7):                      only events inside a step are recorded
        start = recorder.now()
        …                                       any work
        recorder.add("forward", start)          one tuple, with the stage and micro-batch that were set last

``now`` calls ``time.perf_counter``; outside recorded steps it costs an empty call. On CUDA it records an event on the
current stream without synchronizing: times are resolved when the rows are made, relative to the step's first event,
before which the device was idle. Of a long training run only the last steps are kept.

When a run fails, ``rest`` returns what was recorded, with the unfinished step, without waiting for the device. A killed
worker can't call it, so each step is also appended to a journal on disk when it ends (on CUDA, when the device has
finished it).

Events of one stream are nested or disjoint: compute and waits belong to one thread, and an overlapped collective counts
from the end of the one before it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from stagewright.engine.worker.faults import Doing
from stagewright.runs.journal import Journal, RecordedStep, rows_of
from stagewright.runs.worker_folder import UNFINISHED

_KINDS = {  # by the first words of a worker's action
    "forward": "forward",
    "backward": "backward",
    "receive": "receive",
    "optimizer": "optimizer",
    "gradient all-reduce": "collective",
    "reduce": "collective",
}

Mark: TypeAlias = Any
"""A point in time: seconds of ``time.perf_counter``, or a CUDA event."""

# kind, stream, stage, micro-batch, begin, end, bytes, peer, note
_Event: TypeAlias = tuple[str, str, int | None, int | None, Mark, Mark, int | None, int | None, str | None]


@dataclass(slots=True)
class _Step:
    """The events of one step."""

    number: int
    note: str | None
    begun_s: float
    begin: Mark
    end: Mark = 0.0
    events: list[_Event] = field(default_factory=list)


class Recorder:
    """Records the events of this process; a job opens it."""

    def __init__(self) -> None:
        self.now: Callable[[], Mark] = _nothing
        """Current time, in the form that ``add`` takes."""
        self.stage: int | None = None
        self.microbatch: int | None = None
        self._clock: Callable[[], Mark] = time.perf_counter
        self._open = False
        self._steps: deque[_Step] = deque()
        self._events: list[_Event] | None = None
        self._current: _Step | None = None
        self._is_taken = True
        self._waiting: tuple[Mark, str] | None = None
        self._folder: Path | None = None
        self._journal: Journal | None = None
        self._unwritten: deque[_Step] = deque()

    def keep_in(self, folder: Path) -> None:
        """After the next ``open``, also write each recorded step to a journal in this worker's folder."""
        self._folder = folder

    def open(
        self,
        device: torch.device | None = None,
        *,
        most_steps: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Discard earlier events and record the coming steps, of which the last ``most_steps`` are kept.

        ``clock`` replaces the device's clock, for tests that count its calls; then no journal is written.
        """
        on_cuda = device is not None and device.type == "cuda"
        self._clock = clock or (_cuda_mark if on_cuda else time.perf_counter)
        self._steps = deque(maxlen=most_steps)
        self._unwritten = deque(maxlen=most_steps)
        self._current = None
        self._open = True
        self._is_taken = False
        if self._journal is not None:
            self._journal.close()
        self._journal = Journal(self._folder, most_steps) if self._folder is not None and clock is None else None

    def close(self) -> None:
        """Stop recording; recorded events stay."""
        self._open = False
        if self._journal is not None:
            self._write_past()
            self._journal.close()
            self._journal = None

    @property
    def is_recording(self) -> bool:
        """Whether a recorded step is in progress."""
        return self._events is not None

    @contextmanager
    def step(self, number: int, note: str | None = None) -> Iterator[None]:
        """Record the events inside as one step."""
        if not self._open:
            yield
            return
        self._write_past()
        self.now = self._clock
        step = _Step(number, note, time.perf_counter(), self.now())
        self._events, self._current = step.events, step
        try:
            yield
            step.end = self.now()
            self._steps.append(step)
            self._current = None
            if self._journal is not None:
                self._unwritten.append(step)
                self._write_past()
        finally:
            self.now, self._events = _nothing, None
            self.stage = self.microbatch = self._waiting = None

    def add(
        self,
        kind: str,
        start: Mark,
        *,
        stream: str = "compute",
        num_bytes: int | None = None,
        peer: int | None = None,
        note: str | None = None,
    ) -> None:
        """Record an event that began at ``start`` and ends now."""
        events = self._events
        if events is None:
            return
        end = self.now()
        if self._waiting is not None:
            begun, about = self._waiting
            self._waiting = None
            events.append(("collective", "compute", self.stage, self.microbatch, begun, end, None, None, about))
        events.append((kind, stream, self.stage, self.microbatch, start, end, num_bytes, peer, note))

    def begin_overlapped(self, num_bytes: int, note: str) -> Callable[[], None]:
        """Begin a collective that overlaps with compute; call the result, from any thread, when it is done."""
        events = self._events
        if events is None:
            return _nothing
        start, stage, microbatch = self.now(), self.stage, self.microbatch
        clock = self._clock

        def done() -> None:
            events.append(("collective", "collective", stage, microbatch, start, clock(), num_bytes, None, note))

        return done

    def wait_inside(self, note: str) -> None:
        """From now until the end of the current event, the worker waits for collectives."""
        if self._events is not None:
            self._waiting = (self.now(), note)

    def rows(self) -> list[dict[str, Any]]:
        """Return all events in order, as rows of the run folder."""
        self._is_taken = True
        if self._clock is _cuda_mark:
            torch.cuda.synchronize()
        return [row for step in self._steps for row in rows_of(_resolved(step))]

    def rest(self, doing: Doing) -> list[dict[str, Any]]:
        """Return the events that ``rows`` has not returned, with the unfinished step and its current action.

        May be called from any thread while the worker runs.
        """
        if self._is_taken:
            return []
        rows = [row for step in list(self._steps) if _is_past(step.end) for row in rows_of(_resolved(_past(step)))]
        if self._current is not None:
            rows += _unfinished(_past(self._current), doing, on_cuda=self._clock is _cuda_mark)
        return rows

    def _write_past(self) -> None:
        """Append the steps that the device has finished to the journal, without waiting."""
        while self._unwritten and self._journal is not None and _is_past(self._unwritten[0].end):
            step = self._unwritten[0]
            try:
                done = _resolved(step)
            except RuntimeError:
                return  # an event on another stream has not ended yet
            if done.events is not step.events:
                step.events[: len(done.events)] = done.events  # ``rows`` uses them; threads may append to the list
            self._unwritten.popleft()
            self._journal.append(done)


def _past(step: _Step) -> _Step:
    """Return a step with only those events that the device has finished."""
    return replace(step, events=[event for event in list(step.events) if _is_past(event[4]) and _is_past(event[5])])


def _unfinished(step: _Step, doing: Doing, *, on_cuda: bool) -> list[dict[str, Any]]:
    """Return the rows of an unfinished step; its current action began when the last event ended."""
    last_s = max((_seconds(step, event[5]) for event in step.events), default=_seconds(step, step.begin))
    end_s = last_s if on_cuda else max(last_s, time.perf_counter())
    events = list(step.events)
    kind = next((kind for words, kind in _KINDS.items() if doing.action.startswith(words)), None)
    if kind is not None:
        stream = "receive" if kind == "receive" else "compute"
        events.append((kind, stream, doing.stage, doing.microbatch, last_s, end_s, None, None, UNFINISHED))
    return list(rows_of(_resolved(replace(step, end=end_s, note=UNFINISHED, events=events))))


def _is_past(mark: Mark) -> bool:
    return isinstance(mark, float) or bool(mark.query())


def _resolved(step: _Step) -> RecordedStep:
    """Convert a step to seconds; the device must have finished it."""
    if isinstance(step.begin, float):
        return RecordedStep(step=step.number, note=step.note, begin_s=step.begin, end_s=step.end, events=step.events)
    return RecordedStep(
        step=step.number,
        note=step.note,
        begin_s=step.begun_s,
        end_s=_seconds(step, step.end),
        events=[(*event[:4], _seconds(step, event[4]), _seconds(step, event[5]), *event[6:]) for event in step.events],
    )


def _seconds(step: _Step, mark: Mark) -> float:
    if isinstance(mark, float):
        return mark
    return step.begun_s + float(step.begin.elapsed_time(mark)) * 1e-3


def _cuda_mark() -> Mark:
    mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    mark.record()
    return mark


def _nothing() -> Any:
    """Do nothing, outside a recorded step."""
    return 0.0


recorder = Recorder()
