"""The state of a run at one moment.

    PlanRead ──────┐
    MetricsLine ───┤
    ActivitySeen ──┼─► fold(state, change) ─► LiveState ─► snapshot(state, now) ─► page, terminal, --json
    ProcessSeen ───┤
    FaultSeen ─────┤
    ResultRead ────┘

Pure: no files, no clock, no torch. Times are seconds since the epoch, passed in by the reader; a replay has its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from stagewright.engine.worker.faults import Doing, Fault, root_cause
from stagewright.engine.worker.process import ProcessState
from stagewright.report.live.changes import read_duration_s
from stagewright.runs.result import RunResult
from stagewright.spec.plan import Plan

# waiting: no plan yet; starting: no step done; killed: all processes are gone without a result.
Status: TypeAlias = Literal["waiting", "starting", "running", "done", "failed", "refused", "interrupted", "killed"]

GONE_S = 5.0
"""How long a run may still write its result after its last process has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """The state of one worker."""

    rank: int
    doing: Doing = field(default_factory=Doing)
    """The last action that it began."""
    changed_s: float = 0.0
    """When the count of its actions last changed."""
    process: ProcessState = "unknown"
    recent: tuple[tuple[float, float | None], ...] = ()
    """Seconds, and seconds spent waiting for P2P receives, of its last steps."""
    memory_bytes: int | None = None
    """Memory after the last step."""
    peak_memory_bytes: int | None = None

    @property
    def waited(self) -> float | None:
        """Share of its last steps that it spent waiting for P2P receives."""
        times = [(step_s, waited_s) for step_s, waited_s in self.recent if waited_s is not None and step_s > 0]
        return sum(waited_s for _, waited_s in times) / sum(step_s for step_s, _ in times) if times else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """The state of a run."""

    name: str
    """Name of the run folder, or of the path where a run is expected."""
    plan: Plan | None = None
    begun: str | None = None
    """When the run started, in ISO 8601."""
    workers: tuple[WorkerState, ...] = ()
    """By rank."""
    step: int | None = None
    """Number of steps done; None before the first."""
    total: int | None = None
    """Number of steps of the run."""
    per_epoch: int | None = None
    """Steps per epoch; None without epochs."""
    epoch: int | None = None
    """The current epoch, from 1."""
    loss: float | None = None
    """Of the last step; may be infinite or NaN."""
    recent: tuple[tuple[float, int], ...] = ()
    """Seconds and samples of the last steps."""
    curve: tuple[tuple[int, float | None, float], ...] = ()
    """Step, loss and samples/s of every `curve_every`-th step."""
    curve_every: int = 1
    epochs: tuple[Mapping[str, Any], ...] = ()
    """Metrics lines of the epochs that have ended."""
    faults: tuple[Fault, ...] = ()
    """In the order in which they were seen."""
    verdict: Fault | None = None
    """The root cause, as identified by the launcher."""
    result: RunResult | None = None
    gone_s: float | None = None
    """Since when no worker process is left."""
    damaged: str | None = None
    """Why the folder can't be read, in one sentence."""

    def status(self, now_s: float) -> Status:
        if self.result is not None:
            return self.result.status if self.result.status in ("failed", "refused", "interrupted") else "done"
        if self.faults or self.verdict or self.damaged:
            return "failed"
        if self.gone_s is not None and now_s - self.gone_s >= GONE_S:
            return "killed"
        if self.plan is None:
            return "waiting"
        return "running" if self.step is not None else "starting"

    @property
    def samples_per_s(self) -> float | None:
        """Throughput over the last steps."""
        total_s = sum(step_s for step_s, _ in self.recent)
        return sum(samples for _, samples in self.recent) / total_s if total_s > 0 else None

    @property
    def bubble(self) -> float | None:
        """Share of the last steps that workers waited for P2P receives, averaged over workers; pipelines only."""
        if self.plan is None or self.plan.mesh.pipeline == 1:
            return None
        shares = [worker.waited for worker in self.workers if worker.waited is not None]
        return sum(shares) / len(shares) if shares else None

    @property
    def remaining_s(self) -> float | None:
        """Time until the last step and the last evaluation, at the current speed."""
        if self.step is None or self.total is None or not self.recent:
            return None
        steps_s = (self.total - self.step) * sum(step_s for step_s, _ in self.recent) / len(self.recent)
        if not self.per_epoch or not self.epochs:
            return max(0.0, steps_s)
        num_evaluations = math.ceil(self.total / self.per_epoch) - int(self.epochs[-1]["epoch"])
        return max(0.0, steps_s + num_evaluations * (read_duration_s(self.epochs[-1], "evaluation_s") or 0.0))

    @property
    def root_fault(self) -> Fault | None:
        """The fault that caused the others, as far as is known."""
        return self.verdict or (root_cause(list(self.faults)) if self.faults else None)
