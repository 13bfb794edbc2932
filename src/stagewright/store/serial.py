"""The serial run that another one is compared with."""

from __future__ import annotations

from stagewright.errors import UsageError
from stagewright.plan.value import Plan
from stagewright.store.run import RunFolder

__all__ = ["is_alike", "serial_beside"]

_ALIKE = ("model", "batch", "dtype", "training", "optimizer")


def is_alike(one: Plan, other: Plan) -> bool:
    """Whether two plans compute the same, so that their times can be compared."""
    return all(getattr(one, name) == getattr(other, name) for name in _ALIKE)


def serial_beside(folder: RunFolder) -> RunFolder | None:
    """The newest serial run of the same batch beside this one that was timed; None where there is none."""
    plan = folder.plan()
    for other in sorted(folder.path.resolve().parent.iterdir(), reverse=True):
        if not (other / "result.json").is_file() or not (other / "plan.toml").is_file():
            continue
        found = RunFolder(other)
        try:
            theirs, result = found.plan(), found.result() or {}
        except UsageError:
            continue
        if is_alike(theirs, plan) and theirs.mesh.num_workers == 1 and "latency_s" in result:
            return found
    return None
