"""A run's events for Perfetto and Chrome: a process a worker, a track a stream, messages as arrows.

    worker 0   compute      ▕step    ▕forward 0▏▕forward 1▏ …
               send            ▕send 0▏──┐
    worker 1   receive       ▕receive 0  ▼▏

Events of one track are nested or disjoint, at the nanosecond that viewers count in. With operators, those of the one
step that was run to record them lie below its actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from stagewright.simulator.export.chrome import complete_event, save_chrome_trace, track_names
from stagewright.trace.breakdown import message_of
from stagewright.trace.events import STREAMS, Trace, TraceEvent, WorkerTrace
from stagewright.trace.operators import WorkerOperators

__all__ = ["operator_events", "perfetto_events", "write_perfetto"]


def perfetto_events(trace: Trace, steps: Iterable[int] | None = None) -> list[dict[str, Any]]:
    """Everything of some steps, or of all; names of processes and tracks first."""
    wanted = set(trace.steps if steps is None else steps)
    found: list[dict[str, Any]] = []
    for worker in trace.workers:
        found += track_names(worker.rank, _process(worker), STREAMS)
    for worker in trace.workers:
        found += [_event(one, worker.rank) for one in worker.events if one.step in wanted]
    return found + _arrows(trace, wanted)


def operator_events(workers: Sequence[WorkerOperators]) -> list[dict[str, Any]]:
    """The step that was run to record operators: its actions, and the operators below them."""
    begin_s = min(one.start_s for worker in workers for one in worker.operators)
    found: list[dict[str, Any]] = []
    for worker in workers:
        found += track_names(worker.rank, f"worker {worker.rank}", ("compute",))
        for one in worker.operators:
            found.append(
                complete_event(
                    worker.rank,
                    0,
                    one.name,
                    "operator" if one.is_operator else "action",
                    one.start_s - begin_s,
                    one.end_s - begin_s,
                    {"stage": one.stage, "microbatch": one.microbatch},
                )
            )
    return found


def write_perfetto(events: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Write the file, at once."""
    save_chrome_trace(events, path)


def _process(worker: WorkerTrace) -> str:
    stages = ", ".join(map(str, worker.stages))
    place = f" on {worker.host}" if worker.host else ""
    return f"worker {worker.rank}{f', stage {stages}' if stages else ''}{place}"


def _event(event: TraceEvent, rank: int) -> dict[str, Any]:
    about = {name: getattr(event, name) for name in ("step", "stage", "microbatch", "bytes", "peer", "note")}
    known = {name: value for name, value in about.items() if value is not None}
    name = f"step {event.step}" if event.kind == "step" else event.title
    return complete_event(rank, STREAMS.index(event.stream), name, event.kind, event.start_s, event.end_s, known)


def _arrows(trace: Trace, steps: set[int]) -> list[dict[str, Any]]:
    """From where a message was handed over to where its receiver had it."""
    found: list[dict[str, Any]] = []
    numbers: dict[Any, tuple[int, float]] = {}
    ends = [
        (worker.rank, one)
        for worker in trace.workers
        for one in worker.events
        if one.step in steps and one.peer is not None
    ]
    for rank, one in ends:
        if one.kind == "send":
            numbers.setdefault((one.step, *message_of(one, rank)), (len(numbers), one.start_s))
            number, start_s = numbers[one.step, *message_of(one, rank)]
            if start_s == one.start_s:
                found.append(_arrow("s", number, rank, "send", one.start_s))
    for rank, one in ends:
        key = (one.step, *message_of(one, rank))
        if one.kind == "receive" and key in numbers:
            end_s = max(one.start_s, one.end_s - 1e-9)
            found.append({**_arrow("f", numbers[key][0], rank, "receive", end_s), "bp": "e"})
    return found


def _arrow(phase: str, number: int, rank: int, stream: Any, moment_s: float) -> dict[str, Any]:
    track = STREAMS.index(stream)
    about = {"ph": phase, "id": number, "pid": rank, "tid": track, "ts": round(moment_s * 1e9) / 1e3}
    return {**about, "name": "message", "cat": "message"}
