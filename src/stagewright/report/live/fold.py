"""Folding changes into the state of a run. Pure."""

from __future__ import annotations

from dataclasses import replace

from stagewright.report.live.changes import (
    ActivitySeen,
    Change,
    FaultSeen,
    MetricsLine,
    PlanRead,
    ProcessSeen,
    ResultRead,
    read_count,
    read_duration_s,
    read_number,
)
from stagewright.report.live.state import LiveState, WorkerState

NUM_RECENT = 20
"""Steps over which throughput, bubble and remaining time are averaged."""

MAX_POINTS = 400
"""Length of the curves, above which every second point is dropped."""


def fold(state: LiveState, change: Change) -> LiveState:
    """Return the state after one more change."""
    match change:
        case PlanRead():
            return _with_plan(state, change)
        case MetricsLine():
            return _with_line(state, change)
        case FaultSeen(fault=fault, verdict=True):
            return replace(state, verdict=fault)
        case FaultSeen(fault=fault):
            others = (other for other in state.faults if other.worker != fault.worker)
            return replace(state, faults=(*others, fault))
        case ResultRead(result=result):
            return replace(state, result=result)
    if change.rank >= len(state.workers):
        return state
    return _with_activity(state, change) if isinstance(change, ActivitySeen) else _with_process(state, change)


def _with_activity(state: LiveState, change: ActivitySeen) -> LiveState:
    before = state.workers[change.rank]
    if change.doing == before.doing:
        return state
    has_progress = change.doing.count != before.doing.count
    changed_s = change.at_s if has_progress else before.changed_s
    return _with_worker(state, replace(before, doing=change.doing, changed_s=changed_s))


def _with_process(state: LiveState, change: ProcessSeen) -> LiveState:
    before = state.workers[change.rank]
    after = _with_worker(state, replace(before, process=change.state))
    if not all(worker.process == "gone" for worker in after.workers):
        return replace(after, gone_s=None)
    if state.gone_s is not None:
        return after
    # A process that was never seen alive has been gone at least since its last action.
    gone_s = max(worker.changed_s for worker in after.workers) if before.process == "unknown" else change.at_s
    return replace(after, gone_s=min(gone_s or change.at_s, change.at_s))


def _with_plan(state: LiveState, change: PlanRead) -> LiveState:
    """Set the plan; a resolved plan that replaces the requested one keeps the state of the workers."""
    plan, before = change.plan, state.workers
    workers = tuple(
        before[rank] if rank < len(before) else WorkerState(rank=rank) for rank in range(plan.mesh.num_workers)
    )
    total = state.total if plan.task is not None or not plan.training else plan.steps
    return replace(state, name=change.name, plan=plan, begun=change.begun, workers=workers, total=total, damaged=None)


def _with_line(state: LiveState, change: MetricsLine) -> LiveState:
    """Add a line of metrics; user-defined jobs may write any keys, and unknown ones are ignored."""
    values = change.values
    if state.plan is None or change.rank >= len(state.workers):
        return state
    total = read_count(values, "total")
    if total is not None:
        state = replace(state, total=total)
    kind = values.get("kind", "measured")
    if kind == "begin":
        return replace(state, per_epoch=read_count(values, "batches") or None)
    if kind == "epoch":
        epoch = read_count(values, "epoch")
        is_old = epoch is None or (state.epochs and state.epochs[-1]["epoch"] >= epoch)
        return state if is_old else replace(state, epochs=(*state.epochs, dict(values)))
    step, step_s = read_count(values, "step"), read_duration_s(values, "seconds")
    if step is None or step_s is None:
        return state
    state = _with_worker_step(state, change, step_s)
    num_done = step if kind == "step" else step + 1
    if state.step is not None and num_done <= state.step:
        return state  # another worker has reported this step
    return _with_step(state, change, num_done, step_s)


def _with_worker_step(state: LiveState, change: MetricsLine, step_s: float) -> LiveState:
    before = state.workers[change.rank]
    memory = read_count(change.values, "memory_bytes")
    memory_bytes = memory if memory is not None else before.memory_bytes
    sizes = [size for size in (memory_bytes, before.peak_memory_bytes) if size is not None]
    after = replace(
        before,
        recent=(*before.recent[1 - NUM_RECENT :], (step_s, read_duration_s(change.values, "waited_s"))),
        memory_bytes=memory_bytes,
        peak_memory_bytes=max(sizes, default=None),
    )
    return _with_worker(state, after)


def _with_step(state: LiveState, change: MetricsLine, num_done: int, step_s: float) -> LiveState:
    assert state.plan is not None
    values = change.values
    loss, epoch, num_samples = read_number(values, "loss"), read_count(values, "epoch"), read_count(values, "samples")
    samples = state.plan.batch if num_samples is None else num_samples
    every, curve = state.curve_every, state.curve
    if num_done % every == 0 or not curve:
        curve = (*curve, (num_done, loss, samples / step_s if step_s > 0 else 0.0))
        if len(curve) > MAX_POINTS:
            every *= 2
            curve = tuple(point for point in curve if point[0] % every == 0)
    return replace(
        state,
        step=num_done,
        epoch=state.epoch if epoch is None else epoch,
        loss=loss,
        recent=(*state.recent[1 - NUM_RECENT :], (step_s, samples)),
        curve=curve,
        curve_every=every,
    )


def _with_worker(state: LiveState, worker: WorkerState) -> LiveState:
    before = state.workers
    return replace(state, workers=(*before[: worker.rank], worker, *before[worker.rank + 1 :]))
