"""The profiled steps of a job that ``attach`` recorded, as a trace: ``workers/N/step-000005.json`` of each rank."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from stagewright.errors import UsageError
from stagewright.files.json_values import read_object_or_empty
from stagewright.runs.run_folder import RunFolder
from stagewright.trace.events import StepScheduling, Trace
from stagewright.trace.kineto.profile_file import RankProfile, read_profile
from stagewright.trace.kineto.read import trace_of

MARKER = "attached.json"
"""File of a run folder that says that the job was not started by us."""


def is_attached(folder: RunFolder) -> bool:
    """Whether a run folder is that of an attached job."""
    return (folder.path / MARKER).is_file()


def read_marker(folder: RunFolder) -> dict[str, Any]:
    """Return what is known about the job: its command, ranks and device."""
    return read_object_or_empty(folder.path / MARKER)


def profile_path(folder: RunFolder, rank: int, step: int) -> Path:
    """Return where a rank's profile of a step is."""
    return folder.worker(rank).path / f"step-{step:06d}.json"


def attached_profiles(folder: RunFolder) -> dict[int, RankProfile]:
    """Read the profiles of all ranks that have any; a rank's steps are merged."""
    profiles: dict[int, RankProfile] = {}
    for rank in folder.workers():
        for path in sorted(folder.worker(rank).path.glob("step-*.json")):
            profile = read_profile(path, rank)
            before = profiles.get(rank)
            profiles[rank] = profile if before is None else _joined(before, profile)
    return profiles


def read_attached(folder: RunFolder) -> Trace:
    """Read the profiled steps of all ranks."""
    profiles = attached_profiles(folder)
    if not profiles:
        raise UsageError(f"{folder.path} has no profiled step yet: the first one is step 5, or as --profile-steps says")
    trace = trace_of(profiles)
    workers = (replace(worker, scheduling=_scheduling(folder, worker.rank)) for worker in trace.workers)
    return replace(trace, run=str(folder.path), workers=tuple(workers))


def _scheduling(folder: RunFolder, rank: int) -> dict[int, StepScheduling]:
    """Return how a rank's training thread was scheduled, by step; empty if its system did not say."""
    by_step = {}
    for line in folder.metrics(rank):
        step, cpu_s, runqueue_s = line.get("step"), line.get("cpu_s"), line.get("runqueue_s")
        if isinstance(step, int) and _is_time(cpu_s) and _is_time(runqueue_s):
            loading_s = line.get("loading_runqueue_s")
            by_step[step] = StepScheduling(
                cpu_s=cpu_s, runqueue_s=runqueue_s, loading_runqueue_s=loading_s if _is_time(loading_s) else 0.0
            )
    return by_step


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 <= value < math.inf


def _joined(first: RankProfile, second: RankProfile) -> RankProfile:
    return replace(
        first,
        steps={**first.steps, **second.steps},
        compute=[*first.compute, *second.compute],
        communication=[*first.communication, *second.communication],
        copies=[*first.copies, *second.copies],
        host_work=[*first.host_work, *second.host_work],
        marks={name: [*first.marks.get(name, ()), *second.marks.get(name, ())] for name in second.marks},
        flops=first.flops + second.flops,
    )
