"""The run folder: all files of a run. Only the run writes to it.

    runs/2026-11-15-031502-deit-small-pipeline-2/
      plan.toml                     the resolved plan, which can be run again
      environment.json              versions, processor, GPUs
      workers/0/metrics.jsonl       one line for each step, flushed at once
      workers/0/events.journal      its events by step, while it runs or after it was killed
      workers/0/events.parquet      its events; memory.parquet: its memory; written when the worker ends
      workers/0/clock.json          offset of its clock to worker 0's
      predictions.csv               the predicted class of each evaluated sample, if a classifier was trained
      result.json                   written when the run ends; missing while it runs, or after it was killed

A folder is created atomically with its plan and environment. Each worker writes to its own subfolder only.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from stagewright.errors import RunTerminated, UnknownName, UsageError
from stagewright.files.atomic import save_text
from stagewright.files.json_values import read_object
from stagewright.runs.result import RunResult, Status
from stagewright.runs.worker_folder import WorkerFolder
from stagewright.spec.plan import AXES, Plan
from stagewright.spec.plan_file import plan_to_toml, read_plan, write_plan

_CREATE_ONE = "`stagewright runs` lists runs, `stagewright compare mlp-mnist --devices 2` creates some"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    @classmethod
    def create(
        cls, root: str | Path, plan: Plan, *, environment: Mapping[str, Any] | None = None, now: datetime | None = None
    ) -> RunFolder:
        """Create a folder under `root`, named by time, model and mesh; the environment defaults to this machine's."""
        if environment is None:
            from stagewright.machine.machine import probe_machine

            environment = probe_machine().to_dict()
        begun = (now or datetime.now()).astimezone()
        root = Path(root)
        hidden = root / f".new-{secrets.token_hex(6)}"
        try:
            (hidden / "workers").mkdir(parents=True)
            try:
                (hidden / "plan.toml").write_text(plan_to_toml(plan), encoding="utf-8")
                content = {"begun": begun.isoformat(timespec="milliseconds"), **environment}
                (hidden / "environment.json").write_text(_json(content), encoding="utf-8")
                return cls(_move(hidden, root / run_name(plan, begun)))
            except BaseException:
                shutil.rmtree(hidden, ignore_errors=True)
                raise
        except OSError as error:
            raise UsageError(f"can't create a run folder in {root}: {error.strerror}; choose another --root") from None

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open the folder of an existing run; the error suggests the nearest one."""
        path = Path(path)
        if not (path / "plan.toml").is_file():
            raise _no_run(path)
        return cls(path)

    @property
    def name(self) -> str:
        return self.path.name

    def plan(self) -> Plan:
        return read_plan(self.path / "plan.toml")

    def write_plan(self, plan: Plan) -> None:
        """Replace the plan by the resolved one."""
        write_plan(plan, self.path / "plan.toml")

    def environment(self) -> dict[str, Any]:
        """Read the start time and the machine."""
        return _read_json(self.path / "environment.json") or {}

    def worker(self, rank: int) -> WorkerFolder:
        """Return the folder of one worker."""
        return WorkerFolder(path=self.path / "workers" / str(rank))

    def workers(self) -> tuple[int, ...]:
        """Return the ranks of the workers that have a folder."""
        folder = self.path / "workers"
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return tuple(sorted(int(name) for name in names if name.isascii() and name.isdigit() and len(name) <= 6))

    def metrics(self, rank: int) -> Iterator[dict[str, Any]]:
        """Read a worker's metrics so far, step by step."""
        return self.worker(rank).metrics()

    def finish(self, status: Status, result: RunResult | Mapping[str, Any] | None = None) -> None:
        """Write result.json, which ends the run; user-defined jobs may pass a mapping with their keys."""
        if not isinstance(result, RunResult):
            result = RunResult.from_dict(result or {})
        ended = result.ended or datetime.now().astimezone().isoformat(timespec="milliseconds")
        save_text(_json({"status": status, "ended": ended, **result.to_dict()}), self.path / "result.json")

    def finish_with_error(self, error: BaseException) -> None:
        """Finish a run that raised: interrupted by Ctrl-C or SIGTERM, refused for a UsageError, else failed."""
        if isinstance(error, KeyboardInterrupt):
            self.finish("interrupted")
        elif isinstance(error, RunTerminated):
            self.finish("interrupted", RunResult(error=str(error)))
        else:
            refused = isinstance(error, UsageError)
            self.finish("refused" if refused else "failed", RunResult(error=str(error)))

    def result(self) -> RunResult | None:
        """Read result.json; None where the run has not ended."""
        path = self.path / "result.json"
        content = _read_json(path)
        try:
            return None if content is None else RunResult.from_dict(content)
        except (TypeError, ValueError, KeyError) as error:
            raise UsageError(f"{path} is not the result of a run: {error}") from None


def check_root(root: str | Path) -> None:
    """Raise UsageError where no run folder can be created, before anything is computed for it."""
    root = Path(root)
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UsageError(f"can't create a run folder in {root}: {error.strerror}; choose another --root") from None


def run_name(plan: Plan, begun: datetime) -> str:
    """Name a run by time, model and mesh: 2026-11-15-031502-deit-small-pipeline-2."""
    model = re.sub(r"[^A-Za-z0-9._]+", "-", plan.model.name).strip("-._")[-40:].strip("-._") or "model"
    sizes = {axis: f"{plan.mesh.size(axis)}" for axis in AXES if plan.mesh.size(axis) > 1}
    if plan.mesh.tensor_degrees:
        sizes["tensor"] = "-".join(map(str, plan.mesh.tensor_degrees))
    axes = [f"{axis}-{size}" for axis, size in sizes.items()]
    return "-".join([begun.strftime("%Y-%m-%d-%H%M%S"), model, *(axes or ["serial"])])


def _no_run(path: Path) -> UsageError:
    """Explain why a path is not a run, and suggest one."""
    if path.is_file():
        return UsageError(f"{path} is a file; name the run's folder, such as {path.parent}")
    inside, siblings = list_runs(path), list_runs(path.parent)
    if path.is_dir():
        wrong = f"{path} is not a run folder: it has no plan.toml"
        if inside:
            return UsageError(f"{wrong}; name one of its {len(inside)} runs, like {path / inside[0]}")
        deeper = list_runs(path / "runs")
        if deeper:
            return UsageError(f"{wrong}; its runs are in {path / 'runs'}: name one, like {path / 'runs' / deeper[0]}")
        return UsageError(f"{wrong} and contains no runs; {_CREATE_ONE}")
    if siblings:
        return UnknownName("run", path.name, siblings, hint=f"(in {path.parent})")
    return UsageError(
        f"unknown run {path.name!r}: {path} does not exist, and {path.parent} contains no runs; {_CREATE_ONE}"
    )


def list_runs(folder: Path) -> list[str]:
    """List the runs in a folder, newest first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path.name for path in paths if (path / "plan.toml").is_file()), reverse=True)


def _move(folder: Path, wanted: Path) -> Path:
    """Rename the folder, with a suffix where the name is taken: …-pipeline-2, …-pipeline-2-again1."""
    for attempt in count(1):
        target = wanted if attempt == 1 else wanted.with_name(f"{wanted.name}-again{attempt - 1}")
        try:
            os.rename(folder, target)  # fails for an existing run, whose folder is never empty
        except OSError:
            if not os.path.lexists(target):
                raise
        else:
            return target
    raise AssertionError("unreachable")


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return read_object(path)
    except FileNotFoundError:
        return None
