"""Read the events of a run: the files of all workers, on worker 0's clock.

workers/N/events.parquet  +  workers/N/clock.json  ─►  Trace, whose time starts with the first step

A killed or running worker has the complete steps of its journal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stagewright.errors import UsageError
from stagewright.files.json_values import from_json, read_object
from stagewright.runs.run_folder import RunFolder
from stagewright.runs.worker_folder import UNFINISHED, WorkerFolder
from stagewright.spec.plan import Plan
from stagewright.trace.attached import is_attached, read_attached
from stagewright.trace.events import KINDS, STREAMS, Trace, TraceEvent, WorkerTrace

MAX_TIME_S = 1e12
"""Larger times of a clock are damaged."""

_COLUMNS = ("step", "kind", "stream", "stage", "microbatch", "start_s", "end_s", "bytes", "peer", "note", "call")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerClock:
    """Offsets of one worker's ``time.perf_counter``."""

    host: str = ""
    """Host name."""
    offset_s: float = 0.0
    """Add it to this worker's clock to get worker 0's."""
    error_s: float = 0.0
    """Error of the offset: half of the best round trip."""
    wall_s: float = 0.0
    """Add it to this worker's clock to get Unix time."""


def read_trace(folder: RunFolder, *, unfinished: bool = False) -> Trace:
    """Read the events of all workers; UsageError where they are missing.

    ``unfinished`` includes the step in which a run failed, and omits workers that were killed before their first step
    had ended.
    """
    if is_attached(folder):
        return read_attached(folder)
    plan = folder.plan()
    workers_rows: list[tuple[int, WorkerClock, list[dict[str, Any]]]] = []
    for rank in range(plan.mesh.num_workers):
        worker = folder.worker(rank)
        rows = worker.events()
        if rows and not any("kind" in row for row in rows):
            raise UsageError(
                f"the events of {folder.path} were written by an older version, without kinds; run its plan again: "
                f"{_rerun_command(folder, plan)}"
            )
        _check(rows, worker)
        rows = rows if unfinished else _finished(rows)
        if not rows:
            if unfinished and _has_failed(folder):
                continue
            raise UsageError(_missing(folder, plan, rank))
        workers_rows.append((rank, read_clock(worker), rows))
    if not workers_rows:
        raise UsageError(_missing(folder, plan, 0))
    begin = min(
        (row["start_s"] + clock.offset_s for _, clock, rows in workers_rows for row in rows if row["kind"] == "step"),
        default=None,
    )
    if begin is None:
        raise UsageError(f"{folder.path} has events, but no complete step: {_rerun_command(folder, plan)}")
    workers = tuple(
        WorkerTrace(
            rank=rank, host=clock.host, clock_error_s=clock.error_s, events=_events(rows, clock.offset_s - begin)
        )
        for rank, clock, rows in workers_rows
    )
    trace = Trace(run=str(folder.path), mesh=plan.mesh, training=plan.training, workers=workers, num_steps=0)
    num_steps = len(trace.spans)
    if not num_steps:
        raise UsageError(f"{folder.path} has no step that all workers completed: {_rerun_command(folder, plan)}")
    return replace(trace, num_steps=num_steps)


def read_clock(worker: WorkerFolder) -> WorkerClock:
    """Read a worker's clock; without a file, worker 0's clock."""
    path = worker.path / "clock.json"
    try:
        clock = from_json(WorkerClock, read_object(path))
    except FileNotFoundError:
        return WorkerClock()
    except ValueError as error:
        raise UsageError(f"can't read {path}: {error}") from None
    if not all(abs(number) < MAX_TIME_S for number in (clock.offset_s, clock.error_s, clock.wall_s)):
        raise UsageError(f"{path} has a time that is not below {MAX_TIME_S:g} s: {clock}")
    return clock


def _events(rows: Sequence[Mapping[str, Any]], shift_s: float) -> tuple[TraceEvent, ...]:
    events = [
        TraceEvent(
            **{
                **{name: row.get(name) for name in _COLUMNS},
                "start_s": row["start_s"] + shift_s,
                "end_s": row["end_s"] + shift_s,
            }
        )
        for row in rows
    ]
    return tuple(sorted(events, key=lambda event: (event.start_s, -event.end_s)))


def _check(rows: Sequence[Mapping[str, Any]], worker: WorkerFolder) -> None:
    for row in rows:
        wrong = _wrong(row)
        if wrong is not None:
            raise UsageError(f"the events of {worker.path} have {wrong}; was it written by another version?")


def _wrong(row: Mapping[str, Any]) -> str | None:
    """Say what is wrong with an event; None for a valid one."""
    if row.get("kind") not in KINDS:
        return f"an event of the unknown kind {row.get('kind')!r}"
    if row.get("stream") not in STREAMS:
        return f"an event in the unknown stream {row.get('stream')!r}"
    times = [row.get("start_s"), row.get("end_s")]
    if not all(isinstance(time, int | float) and abs(time) < MAX_TIME_S for time in times):
        return f"a {row['kind']} from {times[0]!r} to {times[1]!r} s"
    if not row["end_s"] >= row["start_s"]:
        return f"a {row['kind']} that ends at {row['end_s']} s, before it begins at {row['start_s']} s"
    if not _is_count(row.get("step")):
        return f"a {row['kind']} of the step {row.get('step')!r}"
    for name in ("stage", "microbatch", "bytes", "peer"):
        if row.get(name) is not None and not _is_count(row[name]):
            return f"a {row['kind']} with {name} = {row[name]!r}"
    if row["kind"] in ("send", "receive") and row.get("peer") is not None and row.get("stage") is None:
        return f"a {row['kind']} with a peer but without a stage"
    for name in ("note", "call"):
        if not isinstance(row.get(name), str | None):
            return f"a {row['kind']} with the {name} {row[name]!r}"
    return None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _finished(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of finished steps."""
    unfinished = {row.get("step") for row in rows if row.get("kind") == "step" and row.get("note") == UNFINISHED}
    return [row for row in rows if row.get("step") not in unfinished]


def _has_failed(folder: RunFolder) -> bool:
    result = folder.result()
    return result is not None and result.status != "done"


def _missing(folder: RunFolder, plan: Plan, rank: int) -> str:
    result = folder.result()
    if result is None:
        return f"{folder.path} has no events of worker {rank} yet: no step that is recorded has ended"
    if result.status != "done":
        ended = "was interrupted" if result.status == "interrupted" else "failed"
        return (
            f"{folder.path} has no events of worker {rank}: the run {ended} before one of its recorded steps had ended"
        )
    return f"{folder.path} has no events of worker {rank}; run its plan again: {_rerun_command(folder, plan)}"


def _rerun_command(folder: RunFolder, plan: Plan) -> str:
    if plan.task is not None:
        return f"stagewright train {plan.model.name} {plan.task} --plan {folder.path / 'plan.toml'}"
    count = plan.mesh.num_workers
    return f"torchrun --nproc-per-node {count} -m stagewright worker {folder.path / 'plan.toml'}"
