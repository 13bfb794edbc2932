"""What a page reads: folders as they were typed become runs, fabric runs and studies, as plain values.

    runs/                         every run in it: what `stagewright compare` and `train` left there
    runs/2026-…-pipeline-2        one run
    runs/2026-…-fabric-mlp-4      one fabric run
    studies/2026-…-stages         a study: its own sections, and its runs

What a run has not (an old one has no events, a failed one no result) is None with the reason in `missing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.errors import UnknownName, UsageError
from stagewright.fabric.results.run_folder import FabricFolder
from stagewright.runs.baseline import SerialRun, begun_s, folders_beside, own_serial, serial_runs
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan
from stagewright.spec.plan_file import plan_to_table

if TYPE_CHECKING:
    from stagewright.planner.explain import Explanation
    from stagewright.simulator.forecast import Forecast
    from stagewright.trace.events import Trace
    from stagewright.trace.memory import WorkerMemory

__all__ = ["Found", "RunData", "differences", "find_folders", "flat_plan", "read_runs"]

MOST_RUNS = 40  # unless more are asked for: a page is for comparing


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The folders behind what was typed."""

    runs: tuple[RunFolder, ...] = ()
    """Runs of plans."""
    fabrics: tuple[FabricFolder, ...] = ()
    """Fabric runs."""
    studies: tuple[Path, ...] = ()
    """Studies."""
    damaged: tuple[str, ...] = ()
    """Runs in a folder of runs that can't be read, each with the reason in one sentence."""
    num_left_out: int = 0
    """How many older runs there are that the page is without."""

    @property
    def left_out(self) -> str:
        """What is not shown, in one sentence; empty where everything is."""
        if not self.num_left_out:
            return ""
        shown, every = len(self.runs), len(self.runs) + self.num_left_out
        return (
            f"of {every} runs the newest {shown} are shown and {self.num_left_out} older left out: use --newest "
            f"{every}, or name some"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """One run, as the page needs it."""

    folder: RunFolder
    """The folder."""
    label: str
    """Short, and different from those of the other runs."""
    plan: Plan
    """Its plan."""
    environment: dict[str, Any]
    """Where and when it ran."""
    status: str
    """done, failed, refused (what was asked for can't be), interrupted or unfinished."""
    result: dict[str, Any]
    """What came of it; empty where it has not ended."""
    metrics: tuple[dict[str, Any], ...]
    """Steps of the worker that knows the loss."""
    serial_s: float | None
    """A step of the serial run of its own comparison; None where none is known."""
    serial: str
    """That run: its label, or its folder's name where it is not on the page."""
    trace: Trace | None
    """What every worker did; None where that was not recorded."""
    memory: tuple[WorkerMemory, ...]
    """Memory of each worker over a step; empty where that was not recorded."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why something is not there: trace, memory → one sentence."""
    forecast: Forecast | None = None
    """What was forecast, and why the speed-up is not n; None where it was not asked for."""
    explanation: Explanation | None = None

    @property
    def paint(self) -> str:
        """The colour's name of its strategy."""
        from stagewright.report.palette import strategy_paint

        return strategy_paint(self.plan.mesh.strategy)

    @property
    def is_timed(self) -> bool:
        """Whether it measured steps of one batch, as `compare` does."""
        return self.status == "done" and "latency_s" in self.result

    @property
    def is_trained(self) -> bool:
        """Whether it trained on a task."""
        return self.plan.task is not None

    @property
    def batches_a_step(self) -> int:
        """Batches in one recorded step: inference is timed as a stream of several."""
        return 1 if self.plan.training else self.plan.steps

    @property
    def speedup(self) -> float | None:
        """Over serial; None where it is not equal to serial, or none is known."""
        if not self.is_timed or self.serial_s is None or not self.result.get("equal"):
            return None
        return self.serial_s / float(self.result["latency_s"])


def find_folders(paths: Sequence[str | Path], newest: int = MOST_RUNS) -> Found:
    """What was typed, opened up, of runs the newest; one error where there is nothing."""
    runs: dict[Path, RunFolder] = {}
    fabrics: dict[Path, FabricFolder] = {}
    studies: dict[Path, Path] = {}
    damaged: dict[Path, str] = {}

    def add(path: Path, *, inside: bool) -> None:
        if (path / "study.json").is_file():
            studies[path.resolve()] = path
            for one in _folders(path / "runs"):
                add(one, inside=True)
        elif (path / "plan.toml").is_file():
            try:
                RunFolder(path).plan()
                runs[path.resolve()] = RunFolder(path)
            except UsageError as error:
                if not inside:
                    raise
                damaged[path.resolve()] = str(error)
        elif (path / "fabric.json").is_file():
            fabrics[path.resolve()] = FabricFolder(path)
        elif not inside:
            for one in _folders(path):
                add(one, inside=True)
            if not runs and not fabrics and not studies:
                _refuse(path)

    for path in map(Path, paths):
        add(path, inside=False)
    shown = list(runs.values())
    if len(shown) > newest:
        late = {one.path for one in sorted(shown, key=lambda one: (begun_s(one), one.name))[-newest:]}
        shown = [one for one in shown if one.path in late]
    return Found(
        runs=tuple(shown),
        fabrics=tuple(fabrics.values()),
        studies=tuple(studies.values()),
        damaged=tuple(damaged.values()),
        num_left_out=len(runs) - len(shown),
    )


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return sorted(one for one in path.iterdir() if one.is_dir() and not one.name.startswith("."))


def _refuse(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"there is no run in {path}; make one with: stagewright compare mlp-mnist --devices 2")
    if path.is_file():
        raise UsageError(f"{path} is a file; name the run's folder: {path.parent}")
    names = ("plan.toml", "fabric.json", "study.json")
    beside = [one.name for one in _folders(path.parent) if any((one / name).is_file() for name in names)]
    if not beside:
        raise UsageError(f"there is no folder {path}; `stagewright runs` lists the runs")
    raise UnknownName("run", path.name, sorted(beside, reverse=True), hint=f"(in {path.parent})")


def read_runs(folders: Sequence[RunFolder]) -> tuple[RunData, ...]:
    """Everything that the folders have."""
    plans = [folder.plan() for folder in folders]
    serial = _Serial(folders)
    labels = _labels(plans)
    names = {folder.path.resolve(): label for folder, label in zip(folders, labels, strict=True)}
    return tuple(_read(*one, serial, names) for one in zip(folders, plans, labels, strict=True))


def _read(folder: RunFolder, plan: Plan, label: str, serial: _Serial, names: Mapping[Path, str]) -> RunData:
    result = folder.result()
    own = serial.of(folder, plan) if plan.task is None else None
    missing: dict[str, str] = {}
    return RunData(
        folder=folder,
        label=label,
        plan=plan,
        environment=folder.environment(),
        status="unfinished" if result is None else str(result.get("status", "done")),
        result=result or {},
        metrics=tuple(_metrics(folder, plan)),
        serial_s=None if own is None else own.latency_s,
        serial="" if own is None else names.get(own.folder.path.resolve(), own.folder.name),
        trace=_trace(folder, missing),
        memory=_memory(folder, missing),
        missing=missing,
    )


def _metrics(folder: RunFolder, plan: Plan) -> list[dict[str, Any]]:
    """The lines of the first worker that has losses; without any, the first worker's."""
    first: list[dict[str, Any]] = []
    for rank in folder.workers()[: plan.mesh.num_workers]:
        lines = list(folder.metrics(rank))
        if any(line.get("loss") is not None for line in lines):
            return lines
        first = first or lines
    return first


class _Serial:
    """The serial run of any run's own comparison: in the folder that it is in, else of the runs on the page."""

    def __init__(self, folders: Sequence[RunFolder]) -> None:
        self._shown = serial_runs(folders)
        self._beside: dict[Path, tuple[SerialRun, ...]] = {}

    def of(self, folder: RunFolder, plan: Plan) -> SerialRun | None:
        parent = folder.path.resolve().parent
        if parent not in self._beside:
            self._beside[parent] = serial_runs(folders_beside(folder))
        return own_serial(folder, plan, self._beside[parent]) or own_serial(folder, plan, self._shown)


def _trace(folder: RunFolder, missing: dict[str, str]) -> Trace | None:
    from stagewright.trace.read import read_trace

    try:
        return read_trace(folder)
    except UsageError as error:
        missing["trace"] = str(error)
        return None


def _memory(folder: RunFolder, missing: dict[str, str]) -> tuple[WorkerMemory, ...]:
    from stagewright.trace.memory import read_memory

    try:
        return tuple(read_memory(folder))
    except UsageError as error:
        missing["memory"] = str(error)
        return ()


def flat_plan(plan: Plan) -> dict[str, str]:
    """A plan as names with values, without tables in tables: model.name, mesh.data, cuts."""
    found: dict[str, str] = {}
    for key, value in plan_to_table(plan).items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for name, one in inner:
            text = ", ".join(map(str, one)) if isinstance(one, list) else str(one)
            found[f"{key}.{name}" if name else key] = {"True": "yes", "False": "no"}.get(text, text)
    return found


def differences(plans: Sequence[Plan]) -> tuple[list[str], list[str]]:
    """The keys whose values differ between plans, and those that are the same, in the plan's order."""
    flat = [flat_plan(plan) for plan in plans]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    differ = [key for key in keys if len({one.get(key) for one in flat}) > 1]
    return differ, [key for key in keys if key not in differ]


def _labels(plans: Sequence[Plan]) -> list[str]:
    """What tells the runs apart: model and task, the mesh, what differs between plans alike in these, a number."""
    labels: list[str] = []
    for plan in plans:
        alike = [other for other in plans if _kind(other) == _kind(plan)]
        words = [plan.model.name] if len({other.model.name for other in plans}) > 1 else []
        words += [plan.task] if plan.task is not None and len({other.task for other in plans}) > 1 else []
        words.append(str(plan.mesh))
        own = flat_plan(plan)
        for key in differences(alike)[0]:
            if not key.startswith(("devices", "optimizer.", "model.seed")) and len(words) < 5:
                value = _brief(own.get(key, "–"))
                plain = {"schedule": value, "training": "training" if plan.training else "inference"}
                words.append(plain.get(key, f"{key.rpartition('.')[2]} {value}"))
        text = ", ".join(words)
        before = sum(label == text or label.startswith(f"{text} #") for label in labels)
        labels.append(f"{text} #{before + 1}" if before else text)
    return labels


def _kind(plan: Plan) -> tuple[object, ...]:
    return plan.model.name, plan.task, plan.mesh


def _brief(text: str) -> str:
    return text if len(text) <= 24 else text[:23] + "…"
