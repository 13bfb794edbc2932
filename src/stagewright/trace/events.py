"""The events of a run's workers on one clock, as plain values.

    compute   ▕step ▕forward  ▕all-reduce▏ ▏  ▕backward ▕recompute▏      ▏ ▕optimizer▏ ▏    nested, one track per worker
    receive            ▕wait for a tensor▏                                                   blocks the worker
    send              ▕send▏                                              ▕flush▏            blocks the worker
    collective                                     ▕bucket▏                                  overlaps with compute

Events of one stream of one worker are nested or disjoint. A collective that the worker waits for is in its compute
stream, inside the waiting event; an overlapped one is in the stream ``collective``. Time inside a ``step`` that no
event covers is engine overhead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from stagewright.runs.worker_folder import UNFINISHED
from stagewright.spec.plan import Mesh

EventKind: TypeAlias = Literal[
    "forward",
    "backward",
    "backward-input",
    "backward-weight",
    "recompute",
    "send",
    "receive",
    "encode",
    "decode",
    "collective",
    "optimizer",
    "step",
    "copy",
    "data-loading",
    "checkpoint",
    "garbage-collection",
    "launch",
    "idle",
]
KINDS: tuple[EventKind, ...] = EventKind.__args__  # type: ignore[attr-defined]
HOST_KINDS = ("copy", "data-loading", "checkpoint", "garbage-collection", "launch", "idle")
"""Only in jobs of others: why the device had no work. Copies between host and device; launch: the host prepares work;
idle: nothing was recorded."""
COMPUTE_KINDS = ("forward", "backward", "backward-input", "backward-weight", "recompute", "optimizer")

Stream: TypeAlias = Literal["compute", "send", "receive", "collective"]
STREAMS: tuple[Stream, ...] = Stream.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """One event of a worker."""

    step: int
    """Number of the timed step."""
    kind: EventKind
    stream: Stream
    stage: int | None
    microbatch: int | None
    start_s: float
    """Seconds since the first step began, on worker 0's clock."""
    end_s: float
    bytes: int | None
    """Bytes sent, received, encoded or passed to a collective."""
    peer: int | None
    """World rank of the peer of a send or receive."""
    note: str | None
    """Detail: "loss", "gradient", "data", "tensor", …"""
    call: str | None = None
    """Identity of a collective call among the ranks that took part; None: they called in the same order."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def title(self) -> str:
        """Label: forward 3, send 0."""
        what = "loss" if self.note == "loss" and self.kind == "forward" else self.kind
        return what if self.microbatch is None else f"{what} {self.microbatch}"

    def to_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__}
        return values if self.call is not None else {name: value for name, value in values.items() if name != "call"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScheduling:
    """How the operating system scheduled the training thread of a worker in a step."""

    cpu_s: float
    """Time on a core."""
    runqueue_s: float
    """Time in which it was ready to run, and no core was free."""
    loading_runqueue_s: float = 0.0
    """Part of it while a batch was loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTrace:
    """The events of one worker."""

    rank: int
    host: str
    """Host name."""
    clock_error_s: float
    """Error of its clock offset to worker 0; 0 on the same machine."""
    events: tuple[TraceEvent, ...]
    """All events by start time; of two with the same start, the longer one first."""
    scheduling: Mapping[int, StepScheduling] = field(default_factory=dict)
    """By step, where it was recorded."""

    def step(self, number: int) -> TraceEvent | None:
        """Return the step event with this number; None where the worker has none."""
        return self.steps.get(number)

    @property
    def steps(self) -> dict[int, TraceEvent]:
        """The step events by number."""
        return {event.step: event for event in self.events if event.kind == "step"}

    def of_step(self, number: int) -> tuple[TraceEvent, ...]:
        """Return the events of one step, without the step event."""
        return tuple(event for event in self.events if event.step == number and event.kind != "step")

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this worker."""
        return tuple(sorted({event.stage for event in self.events if event.stage is not None}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The events of all workers of a run."""

    run: str
    """Run folder."""
    mesh: Mesh
    training: bool
    """Forward and backward, or forward only."""
    workers: tuple[WorkerTrace, ...]
    """By rank."""
    num_steps: int

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of the recorded steps."""
        return tuple(self.spans)

    @property
    def spans(self) -> dict[int, tuple[float, float]]:
        """For each step that every worker has, the first start and the last end.

        Includes the step in which the run failed, for which killed workers have no event.
        """
        by_worker = [worker.steps for worker in self.workers]
        failed = self.unfinished_step
        shown = _common(by_worker) | (set() if failed is None else {failed})
        events = {number: [steps[number] for steps in by_worker if number in steps] for number in sorted(shown)}
        return {
            number: (min(event.start_s for event in step), max(event.end_s for event in step))
            for number, step in events.items()
        }

    @property
    def unfinished_step(self) -> int | None:
        """The step in which the run failed, if any: the last one of all workers that were not killed."""
        by_worker = [worker.steps for worker in self.workers]
        unfinished = [{number for number, event in steps.items() if event.note == UNFINISHED} for steps in by_worker]
        common = _common([steps for steps, numbers in zip(by_worker, unfinished, strict=True) if numbers])
        return max(common & set().union(*unfinished), default=None)

    @property
    def median_step(self) -> int:
        """The step of median duration; of two in the middle, the faster."""
        spans = self.spans
        whole = {step: span for step, span in spans.items() if step != self.unfinished_step}
        spans = whole or spans
        ordered = sorted(spans, key=lambda step: (spans[step][1] - spans[step][0], step))
        return ordered[(len(ordered) - 1) // 2]


def _common(steps: Sequence[Mapping[int, TraceEvent]]) -> set[int]:
    return set.intersection(*(set(numbers) for numbers in steps)) if steps else set()
