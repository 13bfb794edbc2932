"""The single-device baseline of a run: the serial run of the same comparison.

    serial A   data A   pipeline A        serial B   pipeline B        pipeline A is compared with serial A, not B
    ───────────────────────────────────────────────────────────► start time

Both compute the same on the same hardware; of several baselines, the last one that started before the run counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from stagewright.errors import UsageError
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan

_EQUAL_FIELDS = ("model", "batch", "dtype", "training", "optimizer")


def is_comparable(first: Plan, second: Plan) -> bool:
    """Whether two plans compute the same on the same kind of device, so that their times can be compared."""
    kinds = {_kind(plan.devices[0]) for plan in (first, second) if plan.devices}
    return len(kinds) < 2 and all(getattr(first, name) == getattr(second, name) for name in _EQUAL_FIELDS)


def _kind(device: str) -> tuple[str, int]:
    """Return kind and number of cores from the text alone: the run's machine may have more cores than this one."""
    kind, _, cores = device.strip().partition(":")
    ranges = [part.split("-") for part in cores.split(",")] if kind == "cpu" and cores else []
    return kind, sum(int(ends[-1]) - int(ends[0]) + 1 for ends in ranges)


def begun_s(folder: RunFolder) -> float:
    """Return the start time of a run in Unix seconds; 0 where it is unknown."""
    text = folder.environment().get("begun")
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRun:
    """A timed run on a single device."""

    folder: RunFolder
    plan: Plan
    begun_s: float
    machine: tuple[str, ...]
    """Names of the processor and the GPUs."""
    latency_s: float


def baseline_runs(folders: Iterable[RunFolder]) -> tuple[BaselineRun, ...]:
    """Return the timed single-device runs among the folders; unreadable ones are skipped."""
    runs = []
    for folder in folders:
        try:
            plan, result = folder.plan(), folder.result()
        except UsageError:
            continue
        if plan.mesh.num_workers == 1 and result is not None and result.latency_s:
            runs.append(
                BaselineRun(
                    folder=folder,
                    plan=plan,
                    begun_s=begun_s(folder),
                    machine=_machine(folder),
                    latency_s=result.latency_s,
                )
            )
    return tuple(runs)


def choose_baseline(folder: RunFolder, plan: Plan, runs: Sequence[BaselineRun]) -> BaselineRun | None:
    """Return the baseline of a run: the last comparable one that began before it, else the first one after it."""
    path, start_s, machine = folder.path.resolve(), begun_s(folder), _machine(folder)
    comparable = [run for run in runs if run.machine == machine and is_comparable(run.plan, plan)]
    for run in comparable:
        if run.folder.path.resolve() == path:
            return run
    before = [run for run in comparable if run.begun_s <= start_s]
    if before:
        return max(before, key=lambda run: (run.begun_s, run.folder.name))
    return min(comparable, key=lambda run: (run.begun_s, run.folder.name), default=None)


def _machine(folder: RunFolder) -> tuple[str, ...]:
    environment = folder.environment()
    gpus = environment.get("gpus")
    names = [str(gpu.get("name")) for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    return str(environment.get("processor")), *names


def find_baseline(folder: RunFolder) -> BaselineRun | None:
    """Return the baseline of a run from the same parent folder; None where there is no comparable one."""
    return choose_baseline(folder, folder.plan(), baseline_runs(sibling_folders(folder)))


def sibling_folders(folder: RunFolder) -> list[RunFolder]:
    """Return the finished runs in the same parent folder, including this one."""
    paths = sorted(folder.path.resolve().parent.iterdir())
    return [RunFolder(path) for path in paths if (path / "result.json").is_file() and (path / "plan.toml").is_file()]
