"""A run's events as the page's script draws them: a lane for each stream of each worker, columns of whole numbers.

    {"unit_s": 1e-6, "kinds": […], "notes": […], "steps": [[number, begin, end], …],
     "workers": [{"label": …, "lanes": [{"stream": "compute", "begin": […], "length": […], "kind": […], …}]}]}

`begin` holds differences from the event before, `kind` and `note` places in the lists above; a column that is the same
for all events of a lane is that one number. So 100,000 events take some 2 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagewright.report.page.sections import Timeline
from stagewright.trace.events import KINDS, STREAMS, Trace, TraceEvent, WorkerTrace

__all__ = ["MOST_EVENTS", "make_timeline", "shown_steps"]

MOST_EVENTS = 120_000  # of a page, so that it stays small
_UNITS_A_S = 1_000_000


def make_timeline(trace: Trace, *, name: str, title: str, most: int = MOST_EVENTS) -> Timeline:
    """The events of as many steps as may be shown, from the first on."""
    steps = shown_steps(trace, most)
    spans = trace.spans
    notes: dict[str, int] = {}
    several = len({worker.host for worker in trace.workers}) > 1
    workers = [_worker(worker, set(steps), notes, several) for worker in trace.workers]
    data: dict[str, Any] = {
        "unit_s": 1 / _UNITS_A_S,
        "kinds": list(KINDS),
        "notes": list(notes),
        "steps": [[step, _whole(spans[step][0]), _whole(spans[step][1])] for step in steps],
        "median": trace.median_step if trace.median_step in steps else steps[0],
        "workers": workers,
    }
    note = ""
    if len(steps) < trace.num_steps:
        note = (
            f"The first {len(steps)} of {trace.num_steps} recorded steps are shown, so that the page stays small; "
            f"all of them: stagewright trace {trace.run} --perfetto FILE"
        )
    return Timeline(name=name, title=title, data=data, note=note)


def shown_steps(trace: Trace, most: int) -> tuple[int, ...]:
    """The first steps with at most so many events in all; at least one."""
    count: dict[int, int] = {}
    for worker in trace.workers:
        for event in worker.events:
            count[event.step] = count.get(event.step, 0) + 1
    found: list[int] = []
    total = 0
    for step in trace.steps:
        total += count[step]
        if found and total > most:
            break
        found.append(step)
    return tuple(found)


def _worker(worker: WorkerTrace, steps: set[int], notes: dict[str, int], several: bool) -> dict[str, Any]:
    streams: dict[str, list[TraceEvent]] = {stream: [] for stream in STREAMS}
    for event in worker.events:
        if event.kind != "step" and event.step in steps:
            streams[event.stream].append(event)
    label = f"worker {worker.rank}" + (f" on {worker.host}" if several else "")
    lanes = [_lane(stream, events, notes) for stream, events in streams.items() if events or stream == "compute"]
    return {"label": label, "error_s": worker.clock_error_s, "lanes": lanes}


def _lane(stream: str, events: Sequence[TraceEvent], notes: dict[str, int]) -> dict[str, Any]:
    begins = [_whole(event.start_s) for event in events]
    kinds = {kind: place for place, kind in enumerate(KINDS)}
    return {
        "stream": stream,
        "begin": [now - before for now, before in zip(begins, [0, *begins[:-1]], strict=True)],
        "length": [_whole(event.end_s) - begin for event, begin in zip(events, begins, strict=True)],
        "kind": _column([kinds[event.kind] for event in events]),
        "stage": _column([event.stage for event in events]),
        "microbatch": _column([event.microbatch for event in events]),
        "bytes": _column([event.bytes for event in events]),
        "peer": _column([event.peer for event in events]),
        "note": _column([None if one.note is None else notes.setdefault(one.note, len(notes)) for one in events]),
    }


def _column(values: list[int | None]) -> list[int] | int:
    """The numbers, -1 where there is none; one number where all are the same."""
    plain = [-1 if value is None else value for value in values]
    return plain[0] if plain and len(set(plain)) == 1 else plain


def _whole(seconds: float) -> int:
    return round(seconds * _UNITS_A_S)
