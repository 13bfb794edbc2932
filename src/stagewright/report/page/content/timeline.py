"""A run's events in the format of the page's script: a lane for each stream of each worker, columns of integers.

    {"unit_s": 1e-6, "kinds": […], "notes": […], "steps": [[number, begin, end], …],
     "workers": [{"label": …, "lanes": [{"stream": "compute", "begin": […], "length": […], "kind": […], …}]}]}

`begin` holds differences to the previous event, `kind` and `note` are indices into the lists above. A column with equal
values is a single number. 100,000 events take about 2 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagewright.report.page.sections import Timeline
from stagewright.trace.events import KINDS, STREAMS, Trace, TraceEvent, WorkerTrace

MAX_EVENTS = 120_000  # per page, to limit its size
_UNITS_PER_S = 1_000_000


def make_timeline(trace: Trace, *, name: str, title: str, max_events: int = MAX_EVENTS) -> Timeline:
    """Convert the events of the first steps, as many as allowed."""
    steps = shown_steps(trace, max_events)
    spans = trace.spans
    notes: dict[str, int] = {}
    multi_host = len({worker.host for worker in trace.workers}) > 1
    workers = [_worker_data(worker, set(steps), notes, multi_host) for worker in trace.workers]
    data: dict[str, Any] = {
        "unit_s": 1 / _UNITS_PER_S,
        "kinds": list(KINDS),
        "notes": list(notes),
        "steps": [[step, _to_units(spans[step][0]), _to_units(spans[step][1])] for step in steps],
        "median": trace.median_step if trace.median_step in steps else steps[0],
        "workers": workers,
    }
    note = ""
    if len(steps) < trace.num_steps:
        note = (
            f"Only the first {len(steps)} of {trace.num_steps} recorded steps are shown to limit the page's size; "
            f"for all of them: stagewright trace {trace.run} --perfetto FILE"
        )
    return Timeline(name=name, title=title, data=data, note=note)


def shown_steps(trace: Trace, max_events: int) -> tuple[int, ...]:
    """Select the first steps with at most that many events in total, but at least one step."""
    counts: dict[int, int] = {}
    for worker in trace.workers:
        for event in worker.events:
            counts[event.step] = counts.get(event.step, 0) + 1
    steps: list[int] = []
    total = 0
    for step in trace.steps:
        total += counts[step]
        if steps and total > max_events:
            break
        steps.append(step)
    return tuple(steps)


def _worker_data(worker: WorkerTrace, steps: set[int], notes: dict[str, int], multi_host: bool) -> dict[str, Any]:
    streams: dict[str, list[TraceEvent]] = {stream: [] for stream in STREAMS}
    for event in worker.events:
        if event.kind != "step" and event.step in steps:
            streams[event.stream].append(event)
    label = f"worker {worker.rank}" + (f" on {worker.host}" if multi_host else "")
    lanes = [_lane_data(stream, events, notes) for stream, events in streams.items() if events or stream == "compute"]
    return {"label": label, "error_s": worker.clock_error_s, "lanes": lanes}


def _lane_data(stream: str, events: Sequence[TraceEvent], notes: dict[str, int]) -> dict[str, Any]:
    begins = [_to_units(event.start_s) for event in events]
    kinds = {kind: index for index, kind in enumerate(KINDS)}
    note_indices = [None if event.note is None else notes.setdefault(event.note, len(notes)) for event in events]
    return {
        "stream": stream,
        "begin": [begin - previous for begin, previous in zip(begins, [0, *begins[:-1]], strict=True)],
        "length": [_to_units(event.end_s) - begin for event, begin in zip(events, begins, strict=True)],
        "kind": _column([kinds[event.kind] for event in events]),
        "stage": _column([event.stage for event in events]),
        "microbatch": _column([event.microbatch for event in events]),
        "bytes": _column([event.bytes for event in events]),
        "peer": _column([event.peer for event in events]),
        "note": _column(note_indices),
    }


def _column(values: list[int | None]) -> list[int] | int:
    """Replace None by -1; return a single number where all values are equal."""
    numbers = [-1 if value is None else value for value in values]
    return numbers[0] if numbers and len(set(numbers)) == 1 else numbers


def _to_units(seconds: float) -> int:
    return round(seconds * _UNITS_PER_S)
