"""Training that goes on after a lost worker: a new run from the last checkpoint, with fewer replicas if needed.

    run 1 ── checkpoint 40 ── worker 1 is killed at step 47
    run 2 from step 40, the same plan ── worker 1 is lost again before the next checkpoint
    run 3 from step 40, without the replica of worker 1

The global batch stays, so the losses are those that the plan with that number of replicas gives. An exception in the
model or a refused plan is not restarted: it would happen again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stagewright.cluster.device import Device
from stagewright.engine.jobs.train import TrainingOptions, train
from stagewright.engine.state.checkpoint import latest
from stagewright.engine.worker.faults import Fault
from stagewright.engine.worker.watchdog import HANG_S
from stagewright.engine.worker.worker import TRAINING_JOB
from stagewright.errors import RunError, StagewrightError, UsageError
from stagewright.runs.result import RunResult
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan
from stagewright.spec.plan_rules import check_plan
from stagewright.spec.unequal_devices import given_speeds

_RESTARTED = ("killed", "exited", "hung", "lost-peer")


@dataclass(slots=True)
class _Attempt:
    """The last run and what it left."""

    folder: RunFolder | None = None
    lost: int | None = None
    """The worker that was lost."""
    checkpoint: Path | None = None


def train_elastic(
    plan: Plan,
    root: str | Path,
    *,
    options: TrainingOptions,
    max_restarts: int = 0,
    hang_s: float = HANG_S,
    progress: Callable[[Mapping[str, Any]], None] | None = None,
    on_folder: Callable[[Path], None] = lambda folder: None,
    note: Callable[[str], None] = lambda text: None,
    job: str = TRAINING_JOB,
) -> RunResult:
    """Train a plan; after a lost worker go on from the last checkpoint, at most ``max_restarts`` times.

    ``on_folder`` is called with each new run folder, ``progress`` with each new metrics line.
    """
    checkpoint = None if options.checkpoint is None else Path(options.checkpoint)
    before = _Attempt(checkpoint=checkpoint)
    for restart in range(max_restarts + 1):
        attempt = _Attempt(checkpoint=before.checkpoint)

        def created(folder: RunFolder, attempt: _Attempt = attempt) -> None:
            attempt.folder = folder
            on_folder(folder.path)

        try:
            return train(plan, root, options=options, progress=progress, hang_s=hang_s, job=job, created=created)
        except RunError as error:
            fault = None if attempt.folder is None else Fault.read(attempt.folder.path / "fault.json")
            if restart == max_restarts or attempt.folder is None or fault is None or fault.kind not in _RESTARTED:
                raise
            attempt.lost = fault.worker
            attempt.checkpoint = latest(attempt.folder.path / "checkpoints") or before.checkpoint
            resolved = attempt.folder.plan()
            plan = next_plan(resolved, attempt.lost, stays_away=_stays_away(resolved, before, attempt))
            first = str(error).partition("\n")[0]
            start = "from scratch" if attempt.checkpoint is None else f"from {attempt.checkpoint}"
            note(f"restart {restart + 1} of {max_restarts}, {plan.mesh}, {start}: {first}")
            options = replace(options, checkpoint=None if attempt.checkpoint is None else str(attempt.checkpoint))
            before = attempt
    raise AssertionError("unreachable")


def next_plan(plan: Plan, lost: int | None, *, stays_away: bool) -> Plan:
    """Return the plan to go on with: the same, or without the replica of a worker whose device stays away.

    Replicas that divide the experts among themselves are lost together.
    """
    mesh = plan.mesh
    if lost is None or not stays_away or mesh.data == mesh.expert:
        return plan
    block = mesh.coordinates(lost)[0] // mesh.expert
    kept = [rank for rank in range(mesh.num_workers) if mesh.coordinates(rank)[0] // mesh.expert != block]
    devices = tuple(plan.devices[rank] for rank in kept if plan.devices)
    speeds = tuple(speed for rank, speed in enumerate(given_speeds(plan)) if rank in kept)
    smaller = replace(plan, mesh=replace(mesh, data=mesh.data - mesh.expert), devices=devices, speeds=speeds)
    if smaller.mesh.data == 1:
        smaller = replace(smaller, shard=False)
    try:
        check_plan(smaller)
    except UsageError:
        return plan
    return smaller


def _stays_away(plan: Plan, before: _Attempt, now: _Attempt) -> bool:
    """Whether a device is gone, or was lost twice without a checkpoint in between."""
    if now.lost is None:
        return False
    try:
        Device.parse(plan.devices[now.lost]).torch_device()
    except (StagewrightError, IndexError):
        return True
    return before.folder is not None and now.lost == before.lost and now.checkpoint == before.checkpoint
