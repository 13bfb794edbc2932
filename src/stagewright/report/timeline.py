"""A step as lanes of bars: what the text and the figure draw, whether it was predicted or measured.

worker 0   F0 F1 F2        B0 F3 B1     from a forecast: one lane for each place along the pipeline
worker 1      F0 B0 F1 B1               from a trace: one lane for each worker
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stagewright.quantity import format_s
from stagewright.trace.events import Trace, TraceEvent

if TYPE_CHECKING:  # a forecast comes with torch, which a trace does without
    from stagewright.simulator.forecast import Forecast

__all__ = ["Bar", "MemoryLine", "Timeline", "forecast_timeline", "trace_timeline"]

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
    "send": "message",
    "receive": "message",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Something that goes on for a while in a lane."""

    lane: int
    """Which lane."""
    stream: str
    """compute; tensor: a collective that is waited for; data: one beside computing; send; receive."""
    name: str
    """F, B, I, W, R (forward again), L (the loss), codec, optimizer, message, all-reduce."""
    stage: int
    """The stage and the micro-batch; -1: of none."""
    microbatch: int
    start_s: float
    """When it begins and ends."""
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """What one lane holds over time."""

    label: str
    """Of the legend."""
    stage: int
    """Whose colour it has."""
    times_s: tuple[float, ...]
    """Moments, and the bytes held from each on."""
    held_bytes: tuple[int, ...]
    limit_bytes: int | None
    """Memory of the device; None: not limited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step, ready to be drawn."""

    title: str
    """What was run, and how it went."""
    caption: str
    step_s: float
    """How long it took."""
    lanes: tuple[str, ...]
    """One name a lane."""
    bars: tuple[Bar, ...]
    """What is in them."""
    memory: tuple[MemoryLine, ...] = ()
    """What each lane holds over time; none where that is not known."""

    @property
    def peak_memory_bytes(self) -> int:
        """The most that any lane holds."""
        return max((max(line.held_bytes) for line in self.memory), default=0)


def forecast_timeline(forecast: Forecast) -> Timeline:
    """The predicted step."""
    chunks = f"{forecast.schedule}, {forecast.microbatches} micro-batches" if len(forecast.workers) > 1 else "one stage"
    return Timeline(
        title=f"{forecast.model}: {forecast.strategy} on {forecast.num_workers} workers, {chunks} (forecast)",
        caption=f"step {format_s(forecast.step_s)}, {forecast.samples_per_s:.4g} samples/s, "
        f"speed-up {forecast.speedup:.2f} × over one device",
        step_s=forecast.step_s,
        lanes=tuple(f"worker {one.worker}" for one in forecast.workers),
        bars=tuple(
            Bar(
                lane=one.worker,
                stream=one.stream,
                name=one.name,
                stage=one.stage,
                microbatch=one.microbatch,
                start_s=one.start_s,
                end_s=one.end_s,
            )
            for one in forecast.segments
        ),
        memory=tuple(
            MemoryLine(
                label=f"worker {one.worker}",
                stage=one.stages[0],
                times_s=one.memory.times_s,
                held_bytes=one.memory.held_bytes,
                limit_bytes=one.memory_limit_bytes,
            )
            for one in forecast.workers
        ),
    )


def trace_timeline(trace: Trace, step: int, title: str) -> Timeline:
    """A measured step, from when its first worker began it."""
    begin_s, end_s = trace.spans[step]
    bars = [
        _bar(one, lane, begin_s)
        for lane, worker in enumerate(trace.workers)
        for one in worker.of_step(step)
        if one.seconds > 0
    ]
    whole = trace.workers[0].step(step)
    broken = step == trace.unfinished_step
    stream = f" (a stream of {whole.note})" if whole is not None and whole.note and not broken else ""
    stream += " (unfinished)" if broken else ""
    return Timeline(
        title=title,
        caption=f"step {step}{stream}: {format_s(end_s - begin_s)}",
        step_s=end_s - begin_s,
        lanes=tuple(f"worker {worker.rank}" for worker in trace.workers),
        bars=tuple(bars),
    )


def _bar(event: TraceEvent, lane: int, begin_s: float) -> Bar:
    stream = "compute"
    if event.stream in ("send", "receive"):
        stream = event.stream
    elif event.kind == "collective":  # waited for, or beside computing
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
