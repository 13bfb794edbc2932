"""Export events to Perfetto and Chrome: a process per worker, a track per stream, P2P sends as arrows.

    worker 0   compute      ▕step    ▕forward 0▏▕forward 1▏ …
               send            ▕send 0▏──┐
    worker 1   receive       ▕receive 0  ▼▏

Events of one track are nested or disjoint at nanosecond resolution. Operators of the step that was run to record them
are nested in its actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from stagewright.simulator.export.chrome import complete_event, track_names
from stagewright.trace.breakdown import message_of
from stagewright.trace.events import STREAMS, Trace, TraceEvent, WorkerTrace
from stagewright.trace.operators import WorkerOperators


def perfetto_events(trace: Trace, steps: Iterable[int] | None = None) -> list[dict[str, Any]]:
    """Return the events of some steps, or of all, after the names of processes and tracks."""
    wanted = set(trace.steps if steps is None else steps)
    events: list[dict[str, Any]] = []
    for worker in trace.workers:
        events += track_names(worker.rank, _process(worker), STREAMS)
    for worker in trace.workers:
        events += [_event(event, worker.rank) for event in worker.events if event.step in wanted]
    return events + _arrows(trace, wanted)


def operator_events(workers: Sequence[WorkerOperators]) -> list[dict[str, Any]]:
    """Return the step that was run to record operators: its actions with their operators."""
    begin_s = min(call.start_s for worker in workers for call in worker.operators)
    events: list[dict[str, Any]] = []
    for worker in workers:
        events += track_names(worker.rank, f"worker {worker.rank}", ("compute",))
        for call in worker.operators:
            kind, about = (
                "operator" if call.is_operator else "action",
                {"stage": call.stage, "microbatch": call.microbatch},
            )
            start_s, end_s = call.start_s - begin_s, call.end_s - begin_s
            events.append(complete_event(worker.rank, 0, call.name, kind, start_s, end_s, about))
    return events


def _process(worker: WorkerTrace) -> str:
    stages = ", ".join(map(str, worker.stages))
    host = f" on {worker.host}" if worker.host else ""
    return f"worker {worker.rank}{f', stage {stages}' if stages else ''}{host}"


def _event(event: TraceEvent, rank: int) -> dict[str, Any]:
    about = {name: getattr(event, name) for name in ("step", "stage", "microbatch", "bytes", "peer", "note")}
    known = {name: value for name, value in about.items() if value is not None}
    name = f"step {event.step}" if event.kind == "step" else event.title
    return complete_event(rank, STREAMS.index(event.stream), name, event.kind, event.start_s, event.end_s, known)


def _arrows(trace: Trace, steps: set[int]) -> list[dict[str, Any]]:
    """Return arrows from each send to its receive."""
    events: list[dict[str, Any]] = []
    numbers: dict[Any, tuple[int, float]] = {}
    ends = [
        (worker.rank, event)
        for worker in trace.workers
        for event in worker.events
        if event.step in steps and event.peer is not None
    ]
    for rank, event in ends:
        if event.kind == "send":
            numbers.setdefault((event.step, *message_of(event, rank)), (len(numbers), event.start_s))
            number, start_s = numbers[event.step, *message_of(event, rank)]
            if start_s == event.start_s:
                events.append(_arrow("s", number, rank, "send", event.start_s))
    for rank, event in ends:
        key = (event.step, *message_of(event, rank))
        if event.kind == "receive" and key in numbers:
            end_s = max(event.start_s, event.end_s - 1e-9)
            events.append({**_arrow("f", numbers[key][0], rank, "receive", end_s), "bp": "e"})
    return events


def _arrow(phase: str, number: int, rank: int, stream: Any, moment_s: float) -> dict[str, Any]:
    track = STREAMS.index(stream)
    about = {"ph": phase, "id": number, "pid": rank, "tid": track, "ts": round(moment_s * 1e9) / 1e3}
    return {**about, "name": "message", "cat": "message"}
