"""A forecast's timeline for Chrome and Perfetto: a process a worker, a thread a stream, memory as a counter.

    {"traceEvents": [{"ph": "X", "pid": worker, "tid": stream, "ts": µs, "dur": µs, "name": "F 3", …}, …]}

Events of one thread never overlap, so that any viewer nests them strictly; messages of both directions, which may pass
at the same time, have threads of their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stagewright.cluster.atomic_file import save_text
from stagewright.forecast.value import Forecast

__all__ = ["chrome_events", "write_chrome_trace"]

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
        about = {"ph": "M", "pid": worker.worker}
        events.append({**about, "name": "process_name", "args": {"name": f"worker {worker.worker}"}})
        for number, thread in enumerate(_THREADS):
            events.append({**about, "tid": number, "name": "thread_name", "args": {"name": thread}})
    for one in forecast.segments:
        thread = f"{one.stream} {one.name}" if one.stream in ("send", "receive") else one.stream
        chunk = f" {one.microbatch}" if one.microbatch >= 0 else ""
        events.append(
            {
                "ph": "X",
                "pid": one.worker,
                "tid": _THREADS.index(thread),
                "ts": one.start_s * 1e6,
                "dur": (one.end_s - one.start_s) * 1e6,
                "name": one.name + chunk,
                "cat": one.stream,
                "args": {"stage": one.stage, "microbatch": one.microbatch},
            }
        )
    for worker in forecast.workers:
        for moment, held in zip(worker.memory.times_s, worker.memory.held_bytes, strict=True):
            events.append(
                {"ph": "C", "pid": worker.worker, "ts": moment * 1e6, "name": "memory", "args": {"bytes": held}}
            )
    return events


def write_chrome_trace(forecast: Forecast, path: str | Path) -> None:
    """Write the trace, at once."""
    content = {"traceEvents": chrome_events(forecast), "displayTimeUnit": "ms"}
    save_text(json.dumps(content) + "\n", path)
