"""The single-device baseline of a run: the fastest single-device plan of the same batch.

    serial A   serial A recomputed   data A   pipeline A        serial B   pipeline B
    ────────────────────────────────────────────────────────────────────────────────► start time

Both compute the same on the same hardware. Of several single-device plans (with activation checkpointing, in
micro-batches) the one with the lowest median step time counts; of its runs, the last one that started before the run:
pipeline A is compared with serial A, neither with its slower recomputed variant nor with serial B. A single step
without warm-up is no baseline.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar

from stagewright.errors import UsageError
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan

_EQUAL_FIELDS = ("model", "batch", "precision", "compile", "training", "optimizer")

Name = TypeVar("Name", bound=Hashable)


def fastest_variant(times_s: Mapping[Name, Sequence[float]]) -> Name | None:
    """Return the single-device plan with the lowest median step time: the baseline of every speed-up."""
    timed = {name: statistics.median(seconds) for name, seconds in times_s.items() if seconds}
    return min(timed, key=lambda name: timed[name], default=None)


def is_warm(plan: Plan) -> bool:
    """Whether a run's step time is one of steady state: a single step without warm-up is not."""
    return plan.warmup > 0 or plan.steps > 1


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
        if plan.mesh.num_workers == 1 and result is not None and result.latency_s and is_warm(plan):
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
    """Return the baseline of a run: of the fastest comparable plan, the last run before it, else the first after it."""
    path, start_s, machine = folder.path.resolve(), begun_s(folder), _machine(folder)
    comparable = [run for run in runs if run.machine == machine and is_comparable(run.plan, plan)]
    variants: list[Plan] = []
    times_s: dict[int, list[float]] = {}
    numbers = []
    for run in comparable:
        variant = _variant(run.plan)
        if variant not in variants:
            variants.append(variant)
        numbers.append(variants.index(variant))
        times_s.setdefault(numbers[-1], []).append(run.latency_s)
    fastest = fastest_variant(times_s)
    candidates = [run for run, number in zip(comparable, numbers, strict=True) if number == fastest]
    for run in candidates:
        if run.folder.path.resolve() == path:
            return run
    before = [run for run in candidates if run.begun_s <= start_s]
    if before:
        return max(before, key=lambda run: (run.begun_s, run.folder.name))
    return min(candidates, key=lambda run: (run.begun_s, run.folder.name), default=None)


def _variant(plan: Plan) -> Plan:
    """Return the plan without what does not change the speed of a step."""
    return replace(plan, devices=(), steps=1, warmup=0, memory_bytes=None, seed=0, baseline="auto")


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
