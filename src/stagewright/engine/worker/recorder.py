"""What this worker does when: the one record of events that a run folder gets, cheap enough to be always on.

    with recorder.step(7):                      only what happens in a step is recorded
        start = recorder.now()
        …                                       any work
        recorder.add("forward", start)          one tuple; stage and micro-batch are those that were set last

``now`` costs a call of ``time.perf_counter`` and, outside recorded steps, nothing but a call. On CUDA it records an
event on the current stream instead, and nothing is waited for: times are resolved when the rows are made, each step's
from its own first event, before which the device was idle. Of a long training run the last steps are kept.

A run that fails still has what was recorded: ``rest`` gives it, with the step that was under way, to whoever ends the
worker. It waits for nothing, not even for the device. A worker that is killed can give nothing: so each step also goes
to a journal on the disk when it ends, on CUDA when the device is done with it.

Events of one stream are nested or disjoint: computing and waiting are one thread's, and a collective that runs beside
them counts from when the one before it is done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from stagewright.runs.journal import Journal, RecordedStep, rows_of
from stagewright.runs.worker_folder import UNFINISHED

if TYPE_CHECKING:
    from stagewright.engine.worker.faults import Doing

__all__ = ["Recorder", "recorder"]

_KINDS = {  # by how the words for what a worker does begin
    "forward": "forward",
    "backward": "backward",
    "receive": "receive",
    "optimizer": "optimizer",
    "sum of gradients": "collective",
    "reduce": "collective",
}

Mark: TypeAlias = Any
"""A moment: seconds of ``time.perf_counter``, or a CUDA event."""

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
    """The one mutable record of this process; a job opens it."""

    def __init__(self) -> None:
        self.now: Callable[[], Mark] = _nothing
        """This moment, as ``add`` takes it."""
        self.stage: int | None = None
        """The stage that is worked on."""
        self.microbatch: int | None = None
        """The micro-batch that is worked on."""
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
        """Write each step that is recorded after the next ``open`` to a journal in this worker's folder, too."""
        self._folder = folder

    def open(
        self,
        device: torch.device | None = None,
        *,
        most_steps: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Forget what was recorded and record the coming steps, of which the last ``most_steps`` are kept.

        ``clock``: read instead of the device's own, for whoever wants to know of each reading; then no journal is kept.
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
        """Record no more; what was recorded stays."""
        self._open = False
        if self._journal is not None:
            self._write_past()
            self._journal.close()
            self._journal = None

    @property
    def is_recording(self) -> bool:
        """Whether a recorded step goes on."""
        return self._events is not None

    @contextmanager
    def step(self, number: int, note: str | None = None) -> Iterator[None]:
        """Record what happens inside as one step."""
        if not self._open:
            yield
            return
        self._write_past()
        self.now = self._clock
        one = _Step(number, note, time.perf_counter(), self.now())
        self._events, self._current = one.events, one
        try:
            yield
            one.end = self.now()
            self._steps.append(one)
            self._current = None
            if self._journal is not None:
                self._unwritten.append(one)
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
        """Something that began at ``start`` ends now."""
        events = self._events
        if events is None:
            return
        end = self.now()
        if self._waiting is not None:
            begun, about = self._waiting
            self._waiting = None
            events.append(("collective", "compute", self.stage, self.microbatch, begun, end, None, None, about))
        events.append((kind, stream, self.stage, self.microbatch, start, end, num_bytes, peer, note))

    def beside(self, num_bytes: int, note: str) -> Callable[[], None]:
        """A collective begins that runs beside computing; call the result, from any thread, when it is done."""
        events = self._events
        if events is None:
            return _nothing
        start, stage, microbatch = self.now(), self.stage, self.microbatch
        clock = self._clock

        def done() -> None:
            events.append(("collective", "collective", stage, microbatch, start, clock(), num_bytes, None, note))

        return done

    def wait_inside(self, note: str) -> None:
        """From now on until the end of what is being recorded, the worker waits for collectives."""
        if self._events is not None:
            self._waiting = (self.now(), note)

    def rows(self) -> list[dict[str, Any]]:
        """All events in the order of their begin, as a run folder keeps them."""
        self._is_taken = True
        if self._clock is _cuda_mark:
            torch.cuda.synchronize()
        return [row for one in self._steps for row in rows_of(_resolved(one))]

    def rest(self, doing: Doing) -> list[dict[str, Any]]:
        """What no one has asked for yet, with the step under way and, in it, what is being done now.

        May be called from any thread while the worker goes on.
        """
        if self._is_taken:
            return []
        found = [row for one in list(self._steps) if _is_past(one.end) for row in rows_of(_resolved(_past(one)))]
        if self._current is not None:
            found += _unfinished(_past(self._current), doing, on_cuda=self._clock is _cuda_mark)
        return found

    def _write_past(self) -> None:
        """Hand over to the journal what the device is done with; nothing is waited for."""
        while self._unwritten and self._journal is not None and _is_past(self._unwritten[0].end):
            one = self._unwritten[0]
            try:
                done = _resolved(one)
            except RuntimeError:
                return  # the end of one, on another stream, is still to come
            if done.events is not one.events:
                one.events[: len(done.events)] = done.events  # for ``rows``, too; others may add to the list
            self._unwritten.popleft()
            self._journal.append(done)


def _past(step: _Step) -> _Step:
    """A step with those of its events that are over by now on the device too."""
    return replace(step, events=[one for one in list(step.events) if _is_past(one[4]) and _is_past(one[5])])


def _unfinished(step: _Step, doing: Doing, *, on_cuda: bool) -> list[dict[str, Any]]:
    """A step as far as it came; what is under way began when the last event ended."""
    last_s = max((_seconds(step, one[5]) for one in step.events), default=_seconds(step, step.begin))
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
    """A step in seconds; the device must be done with it."""
    if isinstance(step.begin, float):
        return RecordedStep(step=step.number, note=step.note, begin_s=step.begin, end_s=step.end, events=step.events)
    return RecordedStep(
        step=step.number,
        note=step.note,
        begin_s=step.begun_s,
        end_s=_seconds(step, step.end),
        events=[_in_seconds(step, one) for one in step.events],
    )


def _in_seconds(step: _Step, event: _Event) -> _Event:
    return (*event[:4], _seconds(step, event[4]), _seconds(step, event[5]), *event[6:])


def _seconds(step: _Step, mark: Mark) -> float:
    if isinstance(mark, float):
        return mark
    return step.begun_s + float(step.begin.elapsed_time(mark)) * 1e-3


def _cuda_mark() -> Mark:
    mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    mark.record()
    return mark


def _nothing() -> Any:
    """Outside a recorded step."""
    return 0.0


recorder = Recorder()
