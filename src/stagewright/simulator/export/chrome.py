"""A forecast's timeline for Chrome and Perfetto: a process a worker, a thread a stream and peer, memory as a counter.

    {"traceEvents": [{"ph": "X", "pid": worker, "tid": stream, "ts": µs, "dur": µs, "name": "F 3", …}, …]}

Events of one thread never overlap, so that any viewer nests them strictly: messages to and from each peer, which may
pass at the same time, have threads of their own in each direction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stagewright.errors import UsageError
from stagewright.files.atomic import save_text
from stagewright.simulator.forecast import Forecast, Segment

__all__ = ["chrome_events", "complete_event", "save_chrome_trace", "track_names", "write_chrome_trace"]

_THREADS = ("compute", "tensor", "data")  # of every worker; those of its peers follow


def chrome_events(forecast: Forecast) -> list[dict[str, Any]]:
    """The events, names of processes and threads first."""
    events: list[dict[str, Any]] = []
    owners = {stage: worker.worker for worker in forecast.workers for stage in worker.stages}
    places = [(one.worker, _thread(one, owners)) for one in forecast.segments]
    threads = {worker.worker: list(_THREADS) for worker in forecast.workers}
    for at, thread in sorted(set(places)):
        if thread not in _THREADS:
            threads[at].append(thread)
    for at, names in threads.items():
        events += track_names(at, f"worker {at}", names)
    for one, (at, thread) in zip(forecast.segments, places, strict=True):
        chunk = f" {one.microbatch}" if one.microbatch >= 0 else ""
        about = {"stage": one.stage, "microbatch": one.microbatch}
        track = threads[at].index(thread)
        events.append(complete_event(at, track, one.name + chunk, one.stream, one.start_s, one.end_s, about))
    for worker in forecast.workers:
        for moment, held in zip(worker.memory.times_s, worker.memory.held_bytes, strict=True):
            events.append(
                {"ph": "C", "pid": worker.worker, "ts": moment * 1e6, "name": "memory", "args": {"bytes": held}}
            )
    return events


def _thread(one: Segment, owners: Mapping[int, int]) -> str:
    """The stream; of a message also what it is and whom it goes to or comes from."""
    if one.stream == "send":
        return f"send {one.name} to {owners[one.stage + (1 if one.name == 'message' else -1)]}"
    return f"receive {one.name} from {owners[one.stage]}" if one.stream == "receive" else one.stream


def write_chrome_trace(forecast: Forecast, path: str | Path) -> None:
    """Write the trace, at once; a forecast without its timeline is refused."""
    if not forecast.segments:
        raise UsageError(f"{path}: the forecast has no timeline: its step is too long for one, or it was left out")
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
