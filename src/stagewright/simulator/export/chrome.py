"""A forecast's timeline for Chrome and Perfetto: a process per worker, a thread per stream and peer, a memory counter.

    {"traceEvents": [{"ph": "X", "pid": worker, "tid": stream, "ts": µs, "dur": µs, "name": "F 3", …}, …]}

Events of one thread never overlap, so viewers nest them correctly. Concurrent sends and receives have one thread per
peer and direction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stagewright.errors import UsageError
from stagewright.files.atomic import save_text
from stagewright.simulator.forecast import Forecast, Segment

_THREADS = ("compute", "tensor", "data")  # of every worker, before those of its peers


def chrome_events(forecast: Forecast) -> list[dict[str, Any]]:
    """Return the trace events, starting with the names of processes and threads."""
    events: list[dict[str, Any]] = []
    owners = {stage: worker.worker for worker in forecast.workers for stage in worker.stages}
    tracks = [(segment.worker, _thread(segment, owners)) for segment in forecast.segments]
    threads = {worker.worker: list(_THREADS) for worker in forecast.workers}
    for worker, thread in sorted(set(tracks)):
        if thread not in _THREADS:
            threads[worker].append(thread)
    for worker, names in threads.items():
        events += track_names(worker, f"worker {worker}", names)
    for segment, (worker, thread) in zip(forecast.segments, tracks, strict=True):
        name = f"{segment.name} {segment.microbatch}" if segment.microbatch >= 0 else segment.name
        args = {"stage": segment.stage, "microbatch": segment.microbatch}
        track = threads[worker].index(thread)
        events.append(complete_event(worker, track, name, segment.stream, segment.start_s, segment.end_s, args))
    for forecast_worker in forecast.workers:
        memory = forecast_worker.memory
        for time_s, held in zip(memory.times_s, memory.held_bytes, strict=True):
            counter = {"ph": "C", "pid": forecast_worker.worker, "ts": time_s * 1e6, "name": "memory"}
            events.append({**counter, "args": {"bytes": held}})
    return events


def _thread(segment: Segment, owners: Mapping[int, int]) -> str:
    """Return the stream; for P2P also its content and peer."""
    if segment.stream == "send":
        return f"send {segment.name} to {owners[segment.stage + (1 if segment.name == 'message' else -1)]}"
    return f"receive {segment.name} from {owners[segment.stage]}" if segment.stream == "receive" else segment.stream


def write_chrome_trace(forecast: Forecast, path: str | Path) -> None:
    """Write the trace atomically; raise UsageError if the forecast has no timeline."""
    if not forecast.segments:
        raise UsageError(f"{path}: the forecast has no timeline: its step has too many actions, or it was left out")
    save_chrome_trace(chrome_events(forecast), path)


def track_names(process: int, name: str, tracks: Sequence[str]) -> list[dict[str, Any]]:
    """Return the events that name a process and its tracks."""
    metadata = {"ph": "M", "pid": process}
    return [
        {**metadata, "name": "process_name", "args": {"name": name}},
        {**metadata, "name": "process_sort_index", "args": {"sort_index": process}},
        *({**metadata, "tid": tid, "name": "thread_name", "args": {"name": track}} for tid, track in enumerate(tracks)),
        *(
            {**metadata, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
            for tid in range(len(tracks))
        ),
    ]


def complete_event(
    process: int, track: int, name: str, category: str, start_s: float, end_s: float, args: Mapping[str, Any]
) -> dict[str, Any]:
    """Return an event with a start and an end, both in whole nanoseconds so that nesting is exact."""
    start, end = round(start_s * 1e9), round(end_s * 1e9)
    return {
        "ph": "X",
        "pid": process,
        "tid": track,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "name": name,
        "cat": category,
        "args": dict(args),
    }


def save_chrome_trace(events: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Write events as a Perfetto and Chrome trace file, atomically."""
    save_text(json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}) + "\n", path)
