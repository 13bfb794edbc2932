"""The input of the report page: folders become runs, fabric runs and studies, as plain values.

    runs/                         every run in it, as `stagewright compare` and `train` write them
    runs/2026-…-pipeline-2        one run
    runs/2026-…-fabric-mlp-4      one fabric run
    studies/2026-…-stages         a study: its own sections, and its runs

What a run lacks (events of an old run, the result of a failed one) is None, with the reason in `missing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stagewright.errors import UnknownName, UsageError
from stagewright.fabric.results.run_folder import FabricFolder
from stagewright.quantity import format_bytes
from stagewright.report.palette import strategy_paint
from stagewright.runs.baseline import BaselineRun, baseline_runs, begun_s, choose_baseline, is_warm, sibling_folders
from stagewright.runs.result import RunResult
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan
from stagewright.spec.plan_file import plan_to_table

if TYPE_CHECKING:
    from stagewright.planner.explain import Explanation
    from stagewright.simulator.forecast import Forecast
    from stagewright.trace.events import Trace
    from stagewright.trace.memory import WorkerMemory

Content = TypeVar("Content")

MAX_RUNS = 40
"""Runs on a page by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFolders:
    """The folders that a report is made from."""

    runs: tuple[RunFolder, ...] = ()
    fabrics: tuple[FabricFolder, ...] = ()
    studies: tuple[Path, ...] = ()
    damaged: tuple[str, ...] = ()
    """Runs that can't be read, each with the reason in one sentence."""
    num_left_out: int = 0
    """Number of older runs that the page omits."""

    @property
    def left_out(self) -> str:
        """What the page omits, in one sentence; empty if nothing."""
        if not self.num_left_out:
            return ""
        num_shown, total = len(self.runs), len(self.runs) + self.num_left_out
        return (
            f"the newest {num_shown} of {total} runs are shown and {self.num_left_out} older ones are left out: use "
            f"--newest {total}, or name runs"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """One run, as the page needs it."""

    folder: RunFolder
    label: str
    """A short name, unique on the page."""
    plan: Plan
    environment: dict[str, Any]
    """The machine, versions, and when the run started."""
    status: str
    """done, failed, refused (the plan is impossible), interrupted or unfinished."""
    result: RunResult
    """Empty for an unfinished run."""
    metrics: tuple[dict[str, Any], ...]
    """Steps of a worker that knows the loss."""
    baseline_s: float | None
    """Step time of the single-device baseline of the same comparison."""
    baseline: str
    """The label of that run, or the name of its folder if it is not on the page."""
    trace: Trace | None
    """Recorded events, if any."""
    memory: tuple[WorkerMemory, ...]
    """Memory of each worker over a step, if recorded."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why something is missing: trace, memory, forecast → one sentence."""
    forecast: Forecast | None = None
    explanation: Explanation | None = None

    @property
    def paint(self) -> str:
        """Name of its strategy's color."""
        return strategy_paint(self.plan.mesh.strategy)

    @property
    def is_timed(self) -> bool:
        """Whether it timed steps of one batch, as `compare` does."""
        return self.status == "done" and self.result.is_timed

    @property
    def is_trained(self) -> bool:
        """Whether it trained on a task."""
        return self.plan.task is not None

    @property
    def batches_per_step(self) -> int:
        """Batches in one recorded step: inference is timed as a stream of several."""
        return 1 if self.plan.training else self.plan.steps

    @property
    def speedup(self) -> float | None:
        """Speed-up over the baseline; None without parity or baseline, or after a single step without warm-up."""
        if not self.is_timed or self.baseline_s is None or not self.result.equal or not is_warm(self.plan):
            return None
        return self.baseline_s / self.result.latency_s


def find_folders(paths: Sequence[str | Path], newest: int = MAX_RUNS) -> ReportFolders:
    """Find runs, fabric runs and studies under the paths, and keep the newest runs; raise if there are none."""
    runs: dict[Path, RunFolder] = {}
    fabrics: dict[Path, FabricFolder] = {}
    studies: dict[Path, Path] = {}
    damaged: dict[Path, str] = {}

    def add(path: Path, *, nested: bool) -> None:
        if (path / "study.json").is_file():
            studies[path.resolve()] = path
            for child in _subfolders(path / "runs"):
                add(child, nested=True)
        elif (path / "plan.toml").is_file():
            try:
                RunFolder(path).plan()
                runs[path.resolve()] = RunFolder(path)
            except UsageError as error:
                if not nested:
                    raise
                damaged[path.resolve()] = str(error)
        elif (path / "fabric.json").is_file():
            fabrics[path.resolve()] = FabricFolder(path)
        elif not nested:
            for child in _subfolders(path):
                add(child, nested=True)
            if not runs and not fabrics and not studies:
                _raise_no_runs(path)

    for path in map(Path, paths):
        add(path, nested=False)
    shown = list(runs.values())
    if len(shown) > newest:
        latest = {run.path for run in sorted(shown, key=lambda run: (begun_s(run), run.name))[-newest:]}
        shown = [run for run in shown if run.path in latest]
    return ReportFolders(
        runs=tuple(shown),
        fabrics=tuple(fabrics.values()),
        studies=tuple(studies.values()),
        damaged=tuple(damaged.values()),
        num_left_out=len(runs) - len(shown),
    )


def _subfolders(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))


def _raise_no_runs(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"there is no run in {path}; make one with: stagewright compare mlp-mnist --devices 2")
    if path.is_file():
        raise UsageError(f"{path} is a file; name the run's folder: {path.parent}")
    files = ("plan.toml", "fabric.json", "study.json")
    names = [child.name for child in _subfolders(path.parent) if any((child / file).is_file() for file in files)]
    if not names:
        raise UsageError(f"there is no folder {path}; `stagewright runs` lists the runs")
    raise UnknownName("run", path.name, sorted(names, reverse=True), hint=f"(in {path.parent})")


def read_runs(folders: Sequence[RunFolder], names: Mapping[str, str] | None = None) -> tuple[RunData, ...]:
    """Read everything that the folders have; `names` has labels by folder, instead of those from the plans."""
    plans = [folder.plan() for folder in folders]
    baselines = _Baselines(folders)
    pairs = zip(folders, _make_labels(plans), strict=True)
    labels = number_repeats((names or {}).get(folder.path.name, label) for folder, label in pairs)
    label_by_path = {folder.path.resolve(): label for folder, label in zip(folders, labels, strict=True)}
    return tuple(
        _read_run(folder, plan, label, baselines, label_by_path)
        for folder, plan, label in zip(folders, plans, labels, strict=True)
    )


def _read_run(
    folder: RunFolder, plan: Plan, label: str, baselines: _Baselines, label_by_path: Mapping[Path, str]
) -> RunData:
    from stagewright.trace.memory import read_memory
    from stagewright.trace.read import read_trace

    result = folder.result()
    baseline = baselines.find(folder, plan) if plan.task is None else None
    missing: dict[str, str] = {}
    return RunData(
        folder=folder,
        label=label,
        plan=plan,
        environment=folder.environment(),
        status="unfinished" if result is None else result.status,
        result=result or RunResult(),
        metrics=tuple(_read_metrics(folder, plan)),
        baseline_s=None if baseline is None else baseline.latency_s,
        baseline="" if baseline is None else label_by_path.get(baseline.folder.path.resolve(), baseline.folder.name),
        trace=_read_or_explain(read_trace, folder, missing, "trace"),
        memory=tuple(_read_or_explain(read_memory, folder, missing, "memory") or ()),
        missing=missing,
    )


def _read_metrics(folder: RunFolder, plan: Plan) -> list[dict[str, Any]]:
    """Read the lines of the first worker that has losses, or else of the first worker."""
    first: list[dict[str, Any]] = []
    for rank in folder.workers()[: plan.mesh.num_workers]:
        lines = list(folder.metrics(rank))
        if any(line.get("loss") is not None for line in lines):
            return lines
        first = first or lines
    return first


class _Baselines:
    """Single-device baselines: those in a run's parent folder, or else those on the page."""

    def __init__(self, folders: Sequence[RunFolder]) -> None:
        self._on_page = baseline_runs(folders)
        self._by_parent: dict[Path, tuple[BaselineRun, ...]] = {}

    def find(self, folder: RunFolder, plan: Plan) -> BaselineRun | None:
        """Find the baseline of a run's comparison."""
        parent = folder.path.resolve().parent
        if parent not in self._by_parent:
            self._by_parent[parent] = baseline_runs(sibling_folders(folder))
        return choose_baseline(folder, plan, self._by_parent[parent]) or choose_baseline(folder, plan, self._on_page)


def _read_or_explain(
    read: Callable[[RunFolder], Content], folder: RunFolder, missing: dict[str, str], what: str
) -> Content | None:
    """Read something of a run; where the run lacks it, put the reason into `missing`."""
    try:
        return read(folder)
    except UsageError as error:
        missing[what] = str(error)
        return None


def flat_plan(plan: Plan) -> dict[str, str]:
    """Flatten a plan into keys and values: model.name, mesh.data, cuts."""
    values: dict[str, str] = {}
    for key, table in plan_to_table(plan).items():
        entries = table.items() if isinstance(table, dict) else [("", table)]
        for name, value in entries:
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            values[f"{key}.{name}" if name else key] = {"True": "yes", "False": "no"}.get(text, text)
    return values


def differences(plans: Sequence[Plan]) -> tuple[list[str], list[str]]:
    """Return the keys whose values differ between plans, and the other keys, in the plan's order."""
    flat = [flat_plan(plan) for plan in plans]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    different = [key for key in keys if len({values.get(key) for values in flat}) > 1]
    return different, [key for key in keys if key not in different]


def _make_labels(plans: Sequence[Plan]) -> list[str]:
    """Label runs by model and task, mesh, the keys that differ between otherwise similar plans, and a number."""
    labels: list[str] = []
    for plan in plans:
        similar = [other for other in plans if _kind(other) == _kind(plan)]
        words = [plan.model.name] if len({other.model.name for other in plans}) > 1 else []
        words += [plan.task] if plan.task is not None and len({other.task for other in plans}) > 1 else []
        words.append(str(plan.mesh))
        values = flat_plan(plan)
        for key in differences(similar)[0]:
            if not key.startswith(("devices", "optimizer.", "model.seed")) and len(words) < 5:
                value = values.get(key, "–")
                value = value if len(value) <= 24 else value[:23] + "…"
                plain = {
                    "schedule": value,
                    "training": "training" if plan.training else "inference",
                    "recompute": "recomputed" if plan.recompute != "none" else "",
                    "microbatches": f"{value} micro-batches",
                    "cuts": f"cut after {value}" if plan.cuts else "",
                    "memory_bytes": f"limit {format_bytes(plan.memory_bytes)}" if plan.memory_bytes else "",
                }
                word = plain.get(key, f"{key.rpartition('.')[2]} {value}")
                words += [word] if word else []
        labels.append(", ".join(words))
    return number_repeats(labels)


def number_repeats(names: Iterable[str]) -> list[str]:
    """Make names unique: the second of the same gets "#2", and so on."""
    numbered: list[str] = []
    for name in names:
        num_before = sum(other == name or other.startswith(f"{name} #") for other in numbered)
        numbered.append(f"{name} #{num_before + 1}" if num_before else name)
    return numbered


def _kind(plan: Plan) -> tuple[object, ...]:
    return plan.model.name, plan.task, plan.mesh
