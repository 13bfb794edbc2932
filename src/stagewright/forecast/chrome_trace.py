"""A forecast's timeline for Chrome and Perfetto: a process a worker, a thread a stream, memory as a counter.

    {"traceEvents": [{"ph": "X", "pid": worker, "tid": stream, "ts": µs, "dur": µs, "name": "F 3", …}, …]}

Events of one thread never overlap, so that any viewer nests them strictly; messages of both directions, which may pass
at the same time, have threads of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stagewright.cluster.atomic_file import save_text
from stagewright.forecast.value import Forecast

__all__ = ["chrome_events", "complete_event", "save_chrome_trace", "track_names", "write_chrome_trace"]

_THREADS = (
    "compute",
    "tensor",
    "data",
    "send message",
    "send gradient",
    "receive message",
    "receive gradient",
)


def chrome_events(forecast: Forecast) -> list[dict[str, Any]]:
    """The events, names of processes and threads first."""
    events: list[dict[str, Any]] = []
    for worker in forecast.workers:
        events += track_names(worker.worker, f"worker {worker.worker}", _THREADS)
    for one in forecast.segments:
        thread = f"{one.stream} {one.name}" if one.stream in ("send", "receive") else one.stream
        chunk = f" {one.microbatch}" if one.microbatch >= 0 else ""
        about = {"stage": one.stage, "microbatch": one.microbatch}
        track = _THREADS.index(thread)
        events.append(complete_event(one.worker, track, one.name + chunk, one.stream, one.start_s, one.end_s, about))
    for worker in forecast.workers:
        for moment, held in zip(worker.memory.times_s, worker.memory.held_bytes, strict=True):
            events.append(
                {"ph": "C", "pid": worker.worker, "ts": moment * 1e6, "name": "memory", "args": {"bytes": held}}
            )
    return events


def write_chrome_trace(forecast: Forecast, path: str | Path) -> None:
    """Write the trace, at once."""
    save_chrome_trace(chrome_events(forecast), path)


def track_names(process: int, name: str, tracks: Sequence[str]) -> list[dict[str, Any]]:
    """The events that name a process and its tracks, in this order."""
    about = {"ph": "M", "pid": process}
    return [
        {**about, "name": "process_name", "args": {"name": name}},
        {**about, "name": "process_sort_index", "args": {"sort_index": process}},
        *({**about, "tid": at, "name": "thread_name", "args": {"name": track}} for at, track in enumerate(tracks)),
        *({**about, "tid": at, "name": "thread_sort_index", "args": {"sort_index": at}} for at in range(len(tracks))),
    ]


def complete_event(
    process: int, track: int, name: str, category: str, start_s: float, end_s: float, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Something with a begin and an end; both are whole nanoseconds, so that what is nested stays nested."""
    start, end = round(start_s * 1e9), round(end_s * 1e9)
    return {
        "ph": "X",
        "pid": process,
        "tid": track,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "name": name,
        "cat": category,
        "args": dict(about),
    }


def save_chrome_trace(events: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Write events as a file for Perfetto and Chrome, at once."""
    save_text(json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}) + "\n", path)
