"""The state of a run as JSON: what the page, the terminal and ``--json`` show. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, TypeAlias

from stagewright.report.live.changes import read_number
from stagewright.report.live.state import LiveState, WorkerState

# idle: no action; prepare: everything around the steps.
ActionKind: TypeAlias = Literal["forward", "backward", "wait", "collective", "optimizer", "prepare", "idle"]

STALL_S = 5.0
"""How long a worker has no new action before the page says so."""

_KIND_WORDS: tuple[tuple[ActionKind, tuple[str, ...]], ...] = (
    ("wait", ("receive", "wait", "join", "barrier", "connect")),
    ("collective", ("all-reduce", "sum of gradients", "collective", "reduce", "gather", "scatter", "broadcast")),
    ("backward", ("backward",)),
    ("forward", ("forward", "recompute")),
    ("optimizer", ("optimizer",)),
)


def snapshot(state: LiveState, now_s: float) -> dict[str, Any]:
    """Return the state as JSON values; all numbers are finite."""
    plan, status = state.plan, state.status(now_s)
    is_active = status in ("starting", "running")
    metric = _find_metric(state.epochs[-1]) if state.epochs else None
    memory = [worker.memory_bytes for worker in state.workers if worker.memory_bytes is not None]
    return {
        "name": state.name,
        "status": status,
        "error": describe_error(state, now_s),
        "model": plan.model.name if plan else None,
        "task": plan.task if plan else None,
        "strategy": plan.mesh.strategy if plan else None,
        "mesh": str(plan.mesh) if plan else None,
        "schedule": plan.schedule if plan and plan.mesh.pipeline > 1 else None,
        "batch": plan.batch if plan else None,
        "microbatches": plan.microbatches if plan else None,
        "training": plan.training if plan else None,
        "begun": state.begun,
        "elapsed_s": _elapsed_s(state, now_s),
        "step": state.step,
        "total": state.total,
        "epoch": state.epoch,
        "epochs": math.ceil(state.total / state.per_epoch) if state.total and state.per_epoch else None,
        "loss": _finite(state.loss),
        "diverged": state.loss is not None and not math.isfinite(state.loss),
        "metric": metric[0] if metric else None,
        "metric_value": _finite(metric[1]) if metric else None,
        "samples_per_s": _rounded(state.samples_per_s),
        "bubble": _rounded(state.bubble),
        "memory_bytes": max(memory) if memory else None,
        "memory_limit_bytes": plan.memory_bytes if plan else None,
        "remaining_s": _rounded(state.remaining_s) if is_active else None,
        "workers": [_worker_snapshot(state, worker, now_s, is_active) for worker in state.workers],
        "curve": [[step, _finite(loss), _rounded(rate)] for step, loss, rate in state.curve],
    }


def describe_error(state: LiveState, now_s: float) -> dict[str, Any] | None:
    """Say which worker failed and why; None where nothing failed."""
    status = state.status(now_s)
    fault = state.root_fault
    if status in ("failed", "refused", "killed") and fault is not None:
        first, _, _ = fault.text().partition("\n")
        action, traceback = str(fault.doing) or None, fault.traceback or None
        return {"worker": fault.worker, "text": first, "at": action, "traceback": traceback}
    if status in ("failed", "refused"):
        reported = state.result.error if state.result is not None else None
        first, _, rest = str(reported or state.damaged or "the run failed without an error message").partition("\n")
        return {"worker": None, "text": first, "at": None, "traceback": rest or None}
    if status == "killed":
        text = "all worker processes ended without a result: they, or their launcher, were killed"
        last = "; ".join(f"worker {worker.rank}: {worker.doing}" for worker in state.workers if str(worker.doing))
        return {"worker": None, "text": text, "at": last or None, "traceback": None}
    return None


def action_kind(action: str) -> ActionKind:
    """Classify an action for display."""
    if not action or action == "finish":
        return "idle"
    return next((kind for kind, words in _KIND_WORDS if any(word in action for word in words)), "prepare")


def _worker_snapshot(state: LiveState, worker: WorkerState, now_s: float, is_active: bool) -> dict[str, Any]:
    plan, doing = state.plan, worker.doing
    assert plan is not None
    data, tensor, pipeline = plan.mesh.coordinates(worker.rank)
    condition = _condition(state, worker, is_active)
    still_s = now_s - worker.changed_s
    is_working = condition in ("working", "stopped")
    return {
        "rank": worker.rank,
        "device": plan.devices[worker.rank] if worker.rank < len(plan.devices) else None,
        "data": data,
        "tensor": tensor,
        "pipeline": pipeline,
        "stages": list(plan.stages_of(pipeline)),
        "condition": condition,
        "kind": action_kind(doing.action) if is_working else "idle",
        "action": doing.action or None,
        "step": doing.step,
        "stage": doing.stage,
        "microbatch": doing.microbatch,
        "still_s": float(int(still_s)) if is_working and still_s >= STALL_S else None,
        "waited": _rounded(worker.waited),
        "memory_bytes": worker.memory_bytes,
        "peak_memory_bytes": worker.peak_memory_bytes,
    }


def _condition(state: LiveState, worker: WorkerState, is_active: bool) -> str:
    if state.root_fault is not None and state.root_fault.worker == worker.rank:
        return "broken"
    if any(fault.worker == worker.rank for fault in state.faults):
        return "lost"
    if not is_active:
        return "ended"
    if worker.process in ("stopped", "gone"):
        return worker.process
    if worker.doing.count:
        return "working"
    # Once other workers have done steps, a silent one must run on another host.
    return "absent" if state.step is None else "elsewhere"


def _elapsed_s(state: LiveState, now_s: float) -> float | None:
    begun_s = _to_unix(state.begun)
    if begun_s is None:
        return None
    ended_s = _to_unix(state.result.ended) if state.result is not None else state.gone_s
    return max(0.0, float(int((now_s if ended_s is None else ended_s) - begun_s)))


def _find_metric(epoch: Mapping[str, Any]) -> tuple[str, float] | None:
    values = ((name, read_number(epoch, name)) for name in ("accuracy", "matthews"))
    return next(((name, value) for name, value in values if value is not None), None)


def _to_unix(text: object) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except (ValueError, OverflowError, OSError):
        return None


def _finite(number: float | None) -> float | None:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return number if number is not None and math.isfinite(number) else None


def _rounded(number: float | None) -> float | None:
    """Round to four digits, so that small changes are not sent to viewers."""
    return float(f"{number:.4g}") if number is not None and math.isfinite(number) else None
