"""What the workers of a run did, as plain values: events on one clock.

    compute   ▕step ▕forward  ▕all-reduce▏ ▏  ▕backward ▕recompute▏      ▏ ▕optimizer▏ ▏    nested, one row a worker
    receive            ▕waits for a message▏                                                 blocks the worker
    send              ▕hands over▏                                        ▕flush▏            blocks the worker
    collective                                     ▕sums a bucket▏                           beside computing

Events of one stream of one worker are nested or disjoint. A collective that the worker waits for is in its compute
stream, inside what waits; one that runs beside computing is in the stream ``collective``. What no event covers inside a
``step`` is the engine's own work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from stagewright.runs.worker_folder import UNFINISHED
from stagewright.spec.plan import Mesh

__all__ = ["COMPUTE_KINDS", "KINDS", "STREAMS", "EventKind", "Stream", "Trace", "TraceEvent", "WorkerTrace"]

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
]
KINDS: tuple[EventKind, ...] = EventKind.__args__  # type: ignore[attr-defined]
COMPUTE_KINDS = ("forward", "backward", "backward-input", "backward-weight", "recompute", "optimizer")

Stream: TypeAlias = Literal["compute", "send", "receive", "collective"]
STREAMS: tuple[Stream, ...] = Stream.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """Something that one worker did for a while."""

    step: int
    """Number of the timed step."""
    kind: EventKind
    """What it did."""
    stream: Stream
    """Which of the worker's streams."""
    stage: int | None
    """The stage; None where it is of no stage."""
    microbatch: int | None
    """The micro-batch; None where it is of none."""
    start_s: float
    """When it began and ended: seconds since the first step began, on worker 0's clock."""
    end_s: float
    bytes: int | None
    """Bytes that were sent, received, encoded (as they travel) or given to a collective."""
    peer: int | None
    """World rank of the other side of a message."""
    note: str | None
    """What more there is to say: "loss", "gradient", "data", "tensor", …"""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s

    @property
    def title(self) -> str:
        """As a person would say it: forward 3, send 0."""
        what = "loss" if self.note == "loss" and self.kind == "forward" else self.kind
        return what if self.microbatch is None else f"{what} {self.microbatch}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTrace:
    """What one worker did."""

    rank: int
    """Its world rank."""
    host: str
    """The machine that it ran on."""
    clock_error_s: float
    """How far its times may be off from worker 0's; 0 on the same machine."""
    events: tuple[TraceEvent, ...]
    """All events, by begin; of two that begin together the longer one first."""

    def step(self, number: int) -> TraceEvent | None:
        """The whole of one step; None where this worker has none of that number."""
        return self.steps.get(number)

    @property
    def steps(self) -> dict[int, TraceEvent]:
        """The whole of every step, by its number."""
        return {one.step: one for one in self.events if one.kind == "step"}

    def of_step(self, number: int) -> tuple[TraceEvent, ...]:
        """The events of one step, the step itself left out."""
        return tuple(one for one in self.events if one.step == number and one.kind != "step")

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that it holds."""
        return tuple(sorted({one.stage for one in self.events if one.stage is not None}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What all workers of a run did."""

    run: str
    """The run folder."""
    mesh: Mesh
    """Sizes of the axes."""
    training: bool
    """Whether it trained, or only ran forward."""
    workers: tuple[WorkerTrace, ...]
    """By rank."""
    num_steps: int
    """How many steps there are to be shown."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Their numbers, in order."""
        return tuple(self.spans)

    @property
    def spans(self) -> dict[int, tuple[float, float]]:
        """For each step that every worker has, when the first one began it and the last one ended it.

        Also for the one in which the run failed: those that were killed in it tell nothing of it.
        """
        found = [worker.steps for worker in self.workers]
        broken = self.unfinished_step
        shown = _common(found) | (set() if broken is None else {broken})
        spans = {step: [one[step] for one in found if step in one] for step in sorted(shown)}
        return {
            step: (min(one.start_s for one in whole), max(one.end_s for one in whole)) for step, whole in spans.items()
        }

    @property
    def unfinished_step(self) -> int | None:
        """The step in which the run failed, where it did in one: the last that all know who were not killed."""
        found = [worker.steps for worker in self.workers]
        broken = [{step for step, event in one.items() if event.note == UNFINISHED} for one in found]
        known = _common([one for one, own in zip(found, broken, strict=True) if own])
        return max(known & set().union(*broken), default=None)

    @property
    def median_step(self) -> int:
        """The step that took as long as a step usually does; of two in the middle, the faster."""
        spans = self.spans
        whole = {step: span for step, span in spans.items() if step != self.unfinished_step}
        spans = whole or spans
        ordered = sorted(spans, key=lambda step: (spans[step][1] - spans[step][0], step))
        return ordered[(len(ordered) - 1) // 2]


def _common(steps: Sequence[Mapping[int, TraceEvent]]) -> set[int]:
    return set.intersection(*(set(one) for one in steps)) if steps else set()
