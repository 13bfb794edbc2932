"""The serial run that another one is compared with: that of its own comparison.

    serial A   data A   pipeline A        serial B   pipeline B        pipeline A is set against serial A, not B
    ───────────────────────────────────────────────────────────► begun

Alike in what they compute and in what they compute on; of several, the last one that began before it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from stagewright.errors import UsageError
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan

__all__ = ["SerialRun", "begun_s", "folders_beside", "is_alike", "own_serial", "serial_beside", "serial_runs"]

_ALIKE = ("model", "batch", "dtype", "training", "optimizer")


def is_alike(one: Plan, other: Plan) -> bool:
    """Whether two plans compute the same on the same kind of device, so that their times can be compared."""
    kinds = {_kind(plan.devices[0]) for plan in (one, other) if plan.devices}
    return len(kinds) < 2 and all(getattr(one, name) == getattr(other, name) for name in _ALIKE)


def _kind(device: str) -> tuple[str, int]:
    """Its kind and number of cores, by its text alone: a run may be of a machine that has more cores than this one."""
    kind, _, places = device.strip().partition(":")
    ends = [part.split("-") for part in places.split(",")] if kind == "cpu" and places else []
    return kind, sum(int(one[-1]) - int(one[0]) + 1 for one in ends)


def begun_s(folder: RunFolder) -> float:
    """When a run began, in seconds; 0 where that is not known."""
    text = folder.environment().get("begun")
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SerialRun:
    """A serial run that was timed."""

    folder: RunFolder
    """Its folder and plan."""
    plan: Plan
    begun_s: float
    """When it began, and on which machine."""
    machine: tuple[str, ...]
    latency_s: float
    """A step."""


def serial_runs(folders: Iterable[RunFolder]) -> tuple[SerialRun, ...]:
    """Those of the runs that are serial and were timed; what can't be read is left out."""
    found = []
    for folder in folders:
        try:
            plan, result = folder.plan(), folder.result()
        except UsageError:
            continue
        if plan.mesh.num_workers == 1 and result is not None and result.latency_s:
            found.append(
                SerialRun(
                    folder=folder,
                    plan=plan,
                    begun_s=begun_s(folder),
                    machine=_machine(folder),
                    latency_s=result.latency_s,
                )
            )
    return tuple(found)


def own_serial(folder: RunFolder, plan: Plan, runs: Sequence[SerialRun]) -> SerialRun | None:
    """Of serial runs, the one that a run is to be compared with; None where none is of such a batch and device.

    The last one that began no later than the run did; without any, the first one after it.
    """
    path, at, machine = folder.path.resolve(), begun_s(folder), _machine(folder)
    alike = [one for one in runs if one.machine == machine and is_alike(one.plan, plan)]
    for one in alike:
        if one.folder.path.resolve() == path:
            return one
    before = [one for one in alike if one.begun_s <= at]
    if before:
        return max(before, key=lambda one: (one.begun_s, one.folder.name))
    return min(alike, key=lambda one: (one.begun_s, one.folder.name), default=None)


def _machine(folder: RunFolder) -> tuple[str, ...]:
    environment = folder.environment()
    return str(environment.get("processor")), *(str(one.get("name")) for one in environment.get("gpus", ()))


def serial_beside(folder: RunFolder) -> SerialRun | None:
    """The serial run that this one is to be compared with, of those in the same folder; None where there is none."""
    return own_serial(folder, folder.plan(), serial_runs(folders_beside(folder)))


def folders_beside(folder: RunFolder) -> list[RunFolder]:
    """The runs in the folder that this one is in, itself among them."""
    beside = sorted(folder.path.resolve().parent.iterdir())
    return [RunFolder(one) for one in beside if (one / "result.json").is_file() and (one / "plan.toml").is_file()]
