"""What is known of a run at one moment, folded from what its folder tells, piece by piece.

    PlanKnown ─┐
    Line ──────┤                              (a line of metrics.jsonl)
    Seen ──────┼─► fold(state, change) ─► LiveState ─► to_dict(now) ─► page, terminal, --json
    Alive ─────┤                              (what has become of a worker's process)
    Failed ────┤
    Ended ─────┘

Pure: no file, no clock, no torch. Times are seconds since the epoch, given by whoever reads; a replay gives its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, TypeAlias

from stagewright.engine.worker.faults import Doing, Fault, root_cause
from stagewright.engine.worker.process import ProcessState
from stagewright.runs.result import RunResult
from stagewright.spec.plan import Plan

__all__ = [
    "Alive",
    "Change",
    "Ended",
    "Failed",
    "Kind",
    "Line",
    "LiveState",
    "PlanKnown",
    "Seen",
    "Status",
    "WorkerState",
    "fold",
    "kind_of",
    "number_of",
]

# waiting: nothing is there yet; starting: no step is done; killed: its processes are gone and left no result.
Status: TypeAlias = Literal["waiting", "starting", "running", "done", "failed", "refused", "interrupted", "killed"]
# What an action is to the one who looks; idle: nothing to do, prepare: everything around the steps.
Kind: TypeAlias = Literal["forward", "backward", "wait", "collective", "optimizer", "prepare", "idle"]

RECENT = 20
"""Steps over which throughput, bubble and remaining time are taken."""

MOST_POINTS = 400
"""Of the curves; then every second one is dropped."""

STILL_S = 5.0
"""Without a new action for so long, a worker's box says so."""

GONE_S = 5.0
"""So long after its last process a run may still write its result."""

_KINDS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("wait", ("receive", "wait", "join", "barrier", "connect")),
    ("collective", ("gradient all-reduce", "sum of gradients", "collective", "reduce", "gather", "scatter", "broadcast")),
    ("backward", ("backward",)),
    ("forward", ("forward", "recompute")),
    ("optimizer", ("optimizer",)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKnown:
    """The plan and the environment can be read."""

    name: str
    """The run folder's name."""
    plan: Plan
    """What runs."""
    begun: str | None = None
    """When it began, in ISO 8601."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A worker has added a line to its metrics."""

    rank: int
    """The worker."""
    values: Mapping[str, Any]
    """The line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a worker's record says that it does."""

    rank: int
    """The worker."""
    doing: Doing
    """Its record."""
    at_s: float
    """When that was read; of an old record, when it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """What has become of a worker's process."""

    rank: int
    """The worker."""
    state: ProcessState
    """Running, stopped, gone, or not to be known from here."""
    at_s: float
    """When that was found out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A worker, or the launcher, has written a fault."""

    fault: Fault
    """The fault."""
    verdict: bool = False
    """Whether the launcher has judged: this one came first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The run has a result, the last word on it."""

    result: RunResult
    """result.json."""


Change: TypeAlias = PlanKnown | Line | Seen | Alive | Failed | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """What is known of one worker."""

    rank: int
    """World rank."""
    doing: Doing = field(default_factory=Doing)
    """The last action that it began."""
    changed_s: float = 0.0
    """When the count of its actions last changed."""
    process: ProcessState = "unknown"
    """What has become of its process."""
    recent: tuple[tuple[float, float | None], ...] = ()
    """Seconds, and seconds waited for messages, of its last steps."""
    memory_bytes: int | None = None
    """Memory of its device that it held after the last step."""
    peak_memory_bytes: int | None = None
    """The most of these."""

    @property
    def waited(self) -> float | None:
        """Share of its last steps that it waited for messages."""
        times = [(took, waited) for took, waited in self.recent if waited is not None and took > 0]
        return sum(one for _, one in times) / sum(took for took, _ in times) if times else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """What is known of a run."""

    name: str
    """The run folder's name, or what is waited for."""
    plan: Plan | None = None
    """What runs; None: not known yet."""
    begun: str | None = None
    """When it began, in ISO 8601."""
    workers: tuple[WorkerState, ...] = ()
    """By rank."""
    step: int | None = None
    """Steps done; None: none yet."""
    total: int | None = None
    """Steps in all."""
    per_epoch: int | None = None
    """Steps in an epoch; None: there are no epochs."""
    epoch: int | None = None
    """The epoch, from 1."""
    loss: float | None = None
    """Of the last step; may be infinite or not a number."""
    recent: tuple[tuple[float, int], ...] = ()
    """Seconds and samples of the last steps."""
    curve: tuple[tuple[int, float | None, float], ...] = ()
    """Step, loss and samples per second, of every `curve_every`-th step."""
    curve_every: int = 1
    """How much of the curve is kept."""
    epochs: tuple[Mapping[str, Any], ...] = ()
    """The lines of the epochs that have ended."""
    faults: tuple[Fault, ...] = ()
    """What failed, in the order in which it was seen."""
    verdict: Fault | None = None
    """The launcher's word on which came first."""
    result: RunResult | None = None
    """result.json."""
    gone_s: float | None = None
    """Since when no worker's process is left."""
    damaged: str | None = None
    """Why the folder can't be read, in one sentence."""

    def status(self, now_s: float) -> Status:
        """How the run stands."""
        if self.result is not None:
            said = self.result.status
            return said if said in ("failed", "refused", "interrupted") else "done"
        if self.faults or self.verdict or self.damaged:
            return "failed"
        if self.gone_s is not None and now_s - self.gone_s >= GONE_S:
            return "killed"
        if self.plan is None:
            return "waiting"
        return "running" if self.step is not None else "starting"

    @property
    def samples_per_s(self) -> float | None:
        """Over the last steps."""
        seconds = sum(took for took, _ in self.recent)
        return sum(samples for _, samples in self.recent) / seconds if seconds > 0 else None

    @property
    def bubble(self) -> float | None:
        """Share of the last steps that workers waited for messages, over all workers; of pipelines alone."""
        if self.plan is None or self.plan.mesh.pipeline == 1:
            return None
        shares = [one.waited for one in self.workers if one.waited is not None]
        return sum(shares) / len(shares) if shares else None

    @property
    def remaining_s(self) -> float | None:
        """Until the last step and the last evaluation are done, if all goes on as it does."""
        if self.step is None or self.total is None or not self.recent:
            return None
        steps_s = (self.total - self.step) * sum(took for took, _ in self.recent) / len(self.recent)
        if not self.per_epoch or not self.epochs:
            return max(0.0, steps_s)
        left = math.ceil(self.total / self.per_epoch) - int(self.epochs[-1]["epoch"])
        return max(0.0, steps_s + left * (number_of(self.epochs[-1], "evaluation_s") or 0.0))

    @property
    def blamed(self) -> Fault | None:
        """The fault that came first, as far as is known."""
        return self.verdict or (root_cause(list(self.faults)) if self.faults else None)

    def error(self, now_s: float) -> dict[str, Any] | None:
        """Who broke the run and why, for people; None where it is not broken."""
        status = self.status(now_s)
        fault = self.blamed
        if status in ("failed", "refused", "killed") and fault is not None:
            first, _, _ = fault.text().partition("\n")
            return {
                "worker": fault.worker,
                "text": first,
                "at": str(fault.doing) or None,
                "traceback": fault.traceback or None,
            }
        if status in ("failed", "refused"):
            told = str(
                (self.result.error if self.result is not None else None)
                or self.damaged
                or "the run failed and did not say why"
            )
            first, _, rest = told.partition("\n")
            return {"worker": None, "text": first, "at": None, "traceback": rest or None}
        if status == "killed":
            text = "every worker's process has ended without a result: they, or what started them, were killed"
            last = "; ".join(f"worker {one.rank}: {one.doing}" for one in self.workers if str(one.doing))
            return {"worker": None, "text": text, "at": last or None, "traceback": None}
        return None

    def to_dict(self, now_s: float) -> dict[str, Any]:
        """What the page, the terminal and ``--json`` show; finite numbers only."""
        plan, status = self.plan, self.status(now_s)
        at_work = status in ("starting", "running")
        metric = _metric(self.epochs[-1]) if self.epochs else None
        memory = [one.memory_bytes for one in self.workers if one.memory_bytes is not None]
        return {
            "name": self.name,
            "status": status,
            "error": self.error(now_s),
            "model": plan.model.name if plan else None,
            "task": plan.task if plan else None,
            "strategy": plan.mesh.strategy if plan else None,
            "mesh": str(plan.mesh) if plan else None,
            "schedule": plan.schedule if plan and plan.mesh.pipeline > 1 else None,
            "batch": plan.batch if plan else None,
            "microbatches": plan.microbatches if plan else None,
            "training": plan.training if plan else None,
            "begun": self.begun,
            "elapsed_s": self._elapsed_s(now_s),
            "step": self.step,
            "total": self.total,
            "epoch": self.epoch,
            "epochs": math.ceil(self.total / self.per_epoch) if self.total and self.per_epoch else None,
            "loss": _finite(self.loss),
            "diverged": self.loss is not None and not math.isfinite(self.loss),
            "metric": metric[0] if metric else None,
            "metric_value": _finite(metric[1]) if metric else None,
            "samples_per_s": _rounded(self.samples_per_s),
            "bubble": _rounded(self.bubble),
            "memory_bytes": max(memory) if memory else None,
            "memory_limit_bytes": plan.memory_bytes if plan else None,
            "remaining_s": _rounded(self.remaining_s) if at_work else None,
            "workers": [self._worker(one, now_s, at_work) for one in self.workers],
            "curve": [[step, _finite(loss), _rounded(rate)] for step, loss, rate in self.curve],
        }

    def _worker(self, one: WorkerState, now_s: float, at_work: bool) -> dict[str, Any]:
        plan, doing = self.plan, one.doing
        assert plan is not None
        data, tensor, pipeline = plan.mesh.coordinates(one.rank)
        failed = any(fault.worker == one.rank for fault in self.faults)
        blamed = self.blamed is not None and self.blamed.worker == one.rank
        if blamed or failed:
            condition = "broken" if blamed else "lost"
        elif not at_work:
            condition = "ended"
        elif one.process in ("stopped", "gone"):
            condition = one.process
        elif doing.count:
            condition = "working"
        else:  # others have done steps: it must run where we can't look
            condition = "absent" if self.step is None else "elsewhere"
        still_s = now_s - one.changed_s
        kind = kind_of(doing.action) if condition in ("working", "stopped") else "idle"
        return {
            "rank": one.rank,
            "device": plan.devices[one.rank] if one.rank < len(plan.devices) else None,
            "data": data,
            "tensor": tensor,
            "pipeline": pipeline,
            "stages": list(plan.stages_of(pipeline)),
            "condition": condition,
            "kind": kind,
            "action": doing.action or None,
            "step": doing.step,
            "stage": doing.stage,
            "microbatch": doing.microbatch,
            "still_s": float(int(still_s)) if condition in ("working", "stopped") and still_s >= STILL_S else None,
            "waited": _rounded(one.waited),
            "memory_bytes": one.memory_bytes,
            "peak_memory_bytes": one.peak_memory_bytes,
        }

    def _elapsed_s(self, now_s: float) -> float | None:
        begun_s = _unix(self.begun)
        if begun_s is None:
            return None
        ended_s = _unix(self.result.ended) if self.result is not None else self.gone_s
        return max(0.0, float(int((now_s if ended_s is None else ended_s) - begun_s)))


def fold(state: LiveState, change: Change) -> LiveState:
    """The state after one more piece of news."""
    match change:
        case PlanKnown():
            return _with_plan(state, change)
        case Line():
            return _with_line(state, change)
        case Failed(fault=fault, verdict=True):
            return replace(state, verdict=fault)
        case Failed(fault=fault):
            return replace(state, faults=(*(one for one in state.faults if one.worker != fault.worker), fault))
        case Ended(result=result):
            return replace(state, result=result)
    if change.rank >= len(state.workers):
        return state
    before = state.workers[change.rank]
    if isinstance(change, Seen):
        if change.doing == before.doing:
            return state
        moved = change.doing.count != before.doing.count
        after = replace(before, doing=change.doing, changed_s=change.at_s if moved else before.changed_s)
        return _with_worker(state, after)
    return _with_process(state, change)


def _with_process(state: LiveState, change: Alive) -> LiveState:
    before = state.workers[change.rank]
    after = _with_worker(state, replace(before, process=change.state))
    if not all(one.process == "gone" for one in after.workers):
        return replace(after, gone_s=None)
    if state.gone_s is not None:
        return after
    # One that was never seen alive has been gone since its last action at least.
    gone_s = max(one.changed_s for one in after.workers) if before.process == "unknown" else change.at_s
    return replace(after, gone_s=min(gone_s or change.at_s, change.at_s))


def _with_plan(state: LiveState, change: PlanKnown) -> LiveState:
    """A resolved plan may replace the one that was asked for: what is known of the workers stays."""
    plan, known = change.plan, state.workers
    workers = tuple(
        known[rank] if rank < len(known) else WorkerState(rank=rank) for rank in range(plan.mesh.num_workers)
    )
    total = state.total if plan.task is not None or not plan.training else plan.steps
    return replace(state, name=change.name, plan=plan, begun=change.begun, workers=workers, total=total, damaged=None)


def _with_line(state: LiveState, change: Line) -> LiveState:
    """A job of someone's own may write what it likes: what is not ours is left out."""
    values, plan = change.values, state.plan
    if plan is None or change.rank >= len(state.workers):
        return state
    total = number_of(values, "total")
    if total is not None:
        state = replace(state, total=int(total))
    kind, step, seconds = values.get("kind", "measured"), number_of(values, "step"), number_of(values, "seconds")
    if kind == "begin":
        per_epoch = number_of(values, "batches")
        return replace(state, per_epoch=int(per_epoch) if per_epoch else None)
    if kind == "epoch":
        epoch = number_of(values, "epoch")
        seen = epoch is None or (state.epochs and state.epochs[-1]["epoch"] >= epoch)
        return state if seen else replace(state, epochs=(*state.epochs, dict(values)))
    if step is None or seconds is None:
        return state
    before = state.workers[change.rank]
    memory = number_of(values, "memory_bytes")
    held = int(memory) if memory is not None else before.memory_bytes
    after = replace(
        before,
        recent=(*before.recent[1 - RECENT :], (seconds, number_of(values, "waited_s"))),
        memory_bytes=held,
        peak_memory_bytes=max((one for one in (held, before.peak_memory_bytes) if one is not None), default=None),
    )
    state = _with_worker(state, after)
    done = int(step) if kind == "step" else int(step) + 1
    if state.step is not None and done <= state.step:
        return state  # another worker has told of this step
    loss, epoch, told = number_of(values, "loss"), number_of(values, "epoch"), number_of(values, "samples")
    samples = plan.batch if told is None else int(told)
    every, curve = state.curve_every, state.curve
    if done % every == 0 or not curve:
        curve = (*curve, (done, loss, samples / seconds if seconds > 0 else 0.0))
        if len(curve) > MOST_POINTS:
            every *= 2
            curve = tuple(point for point in curve if point[0] % every == 0)
    return replace(
        state,
        step=done,
        epoch=state.epoch if epoch is None else int(epoch),
        loss=loss,
        recent=(*state.recent[1 - RECENT :], (seconds, samples)),
        curve=curve,
        curve_every=every,
    )


def number_of(values: Mapping[str, Any], name: str) -> float | None:
    """A number of a line; None where there is none, or something else."""
    found = values.get(name)
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def _with_worker(state: LiveState, worker: WorkerState) -> LiveState:
    before = state.workers
    return replace(state, workers=(*before[: worker.rank], worker, *before[worker.rank + 1 :]))


def kind_of(action: str) -> Kind:
    """What an action is to the one who looks."""
    if not action or action == "finish":
        return "idle"
    return next((kind for kind, words in _KINDS if any(word in action for word in words)), "prepare")


def _metric(epoch: Mapping[str, Any]) -> tuple[str, float] | None:
    found = ((name, number_of(epoch, name)) for name in ("accuracy", "matthews"))
    return next(((name, value) for name, value in found if value is not None), None)


def _unix(text: object) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except ValueError:
        return None


def _finite(number: float | None) -> float | None:
    """JSON knows no NaN."""
    return number if number is not None and math.isfinite(number) else None


def _rounded(number: float | None) -> float | None:
    """Four digits: what changes less is no news."""
    return float(f"{number:.4g}") if number is not None and math.isfinite(number) else None
