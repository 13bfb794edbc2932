"""A step as lanes of bars, forecast or measured; drawn by `timeline_text` and `figures.timeline`.

worker 0   F0 F1 F2        B0 F3 B1     forecast: one lane per pipeline rank
worker 1      F0 B0 F1 B1               trace: one lane per worker
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stagewright.quantity import format_s
from stagewright.trace.breakdown import blocking_events
from stagewright.trace.events import HOST_KINDS, Trace, TraceEvent

if TYPE_CHECKING:  # forecasts import torch, which traces do not need
    from stagewright.simulator.forecast import Forecast

_NAMES = {
    "forward": "F",
    "backward": "B",
    "backward-input": "I",
    "backward-weight": "W",
    "recompute": "R",
    "encode": "codec",
    "decode": "codec",
    "optimizer": "optimizer",
    "collective": "all-reduce",
    "send": "P2P",
    "receive": "P2P",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """An interval of activity in a lane."""

    lane: int
    stream: str
    """compute; tensor: an exposed collective; data: a collective overlapped with compute; send; receive; wait: a worker
    that waits for its peers before a collective."""
    name: str
    """F, B, I, W, R (recompute), L (the loss), codec, optimizer, P2P, all-reduce, wait."""
    stage: int
    """-1: no stage."""
    microbatch: int
    """-1: no micro-batch."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """Memory of one lane over time."""

    label: str
    """Legend entry."""
    stage: int
    """The stage whose color it has."""
    times_s: tuple[float, ...]
    held_bytes: tuple[int, ...]
    """Bytes held from each time on."""
    limit_bytes: int | None
    """Memory of the device; None: not limited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step, ready to be drawn."""

    title: str
    caption: str
    step_s: float
    lanes: tuple[str, ...]
    """Names of the lanes."""
    bars: tuple[Bar, ...]
    memory: tuple[MemoryLine, ...] = ()
    """Memory of each lane over time; empty if unknown."""
    is_measured: bool = False
    """Whether exposed collectives are bars of their own, so that overlapped ones never block a worker."""

    @property
    def peak_memory_bytes(self) -> int:
        """Peak memory of any lane."""
        return max((max(line.held_bytes) for line in self.memory), default=0)


def forecast_timeline(forecast: Forecast) -> Timeline:
    """Convert a forecast step."""
    chunks = f"{forecast.schedule}, {forecast.microbatches} micro-batches" if len(forecast.workers) > 1 else "one stage"
    return Timeline(
        title=f"{forecast.model}: {forecast.strategy} on {forecast.num_workers} workers, {chunks} (forecast)",
        caption=f"step {format_s(forecast.step_s)}, {forecast.samples_per_s:.4g} samples/s, "
        f"speed-up {forecast.speedup:.2f} × over the single-device baseline",
        step_s=forecast.step_s,
        lanes=tuple(f"worker {worker.worker}" for worker in forecast.workers),
        bars=tuple(
            Bar(
                lane=segment.worker,
                stream=segment.stream,
                name=segment.name,
                stage=segment.stage,
                microbatch=segment.microbatch,
                start_s=segment.start_s,
                end_s=segment.end_s,
            )
            for segment in forecast.segments
        ),
        memory=tuple(
            MemoryLine(
                label=f"worker {worker.worker}",
                stage=worker.stages[0],
                times_s=worker.memory.times_s,
                held_bytes=worker.memory.held_bytes,
                limit_bytes=worker.memory_limit_bytes,
            )
            for worker in forecast.workers
        ),
    )


def trace_timeline(trace: Trace, step: int, title: str) -> Timeline:
    """Convert a measured step; time starts when its first worker begins it.

    A collective begins when its last worker arrives, as in the breakdown: until then the others wait.
    """
    begin_s, end_s = trace.spans[step]
    bars = []
    blocking = blocking_events(trace, step)
    for lane, worker in enumerate(trace.workers):
        waits = {id(blocked.event): blocked.waited_s for blocked in blocking[worker.rank]}
        for event in worker.of_step(step):
            if event.kind in HOST_KINDS:
                continue
            waited_s = waits.get(id(event), 0.0) if event.kind == "collective" else 0.0
            if event.seconds > waited_s:
                bars.append(_make_bar(replace(event, start_s=event.start_s + waited_s), lane, begin_s))
            if waited_s > 0:
                end_of_wait = replace(event, end_s=event.start_s + waited_s)
                bars.append(replace(_make_bar(end_of_wait, lane, begin_s), stream="wait", name="wait"))
    step_event = trace.workers[0].step(step)
    is_unfinished = step == trace.unfinished_step
    has_note = step_event is not None and step_event.note and not is_unfinished
    detail = f" (a stream of {step_event.note})" if step_event is not None and has_note else ""
    detail += " (unfinished)" if is_unfinished else ""
    return Timeline(
        title=title,
        caption=f"step {step}{detail}: {format_s(end_s - begin_s)}",
        step_s=end_s - begin_s,
        lanes=tuple(f"worker {worker.rank}" for worker in trace.workers),
        bars=tuple(bars),
        is_measured=True,
    )


def _make_bar(event: TraceEvent, lane: int, begin_s: float) -> Bar:
    stream = "compute"
    if event.stream in ("send", "receive"):
        stream = event.stream
    elif event.kind == "collective":  # exposed, or overlapped with compute
        stream = "tensor" if event.stream == "compute" else "data"
    return Bar(
        lane=lane,
        stream=stream,
        name="L" if event.note == "loss" and event.kind == "forward" else _NAMES[event.kind],
        stage=-1 if event.stage is None else event.stage,
        microbatch=-1 if event.microbatch is None else event.microbatch,
        start_s=event.start_s - begin_s,
        end_s=event.end_s - begin_s,
    )
