"""The folder of a fabric run: workload, raw trials, result.

runs/2026-11-15-031502-fabric-mlp-mnist-4/
  fabric.json          workload and settings, written before the first trial
  trials.parquet       a row per trial, message and rank
  steps.parquet        when each step was sent and received, if recorded
  result.json          the result; missing while the run is in progress or if it was killed
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from stagewright.errors import UnknownName, UsageError
from stagewright.extras import require
from stagewright.fabric.ranks.coordinator import Measurements
from stagewright.fabric.traffic.workload import Workload
from stagewright.fabric.trials import TrialTable, read_trials, write_trials
from stagewright.files.atomic import save_text
from stagewright.files.json_values import read_object


@dataclass(frozen=True, slots=True)
class FabricFolder:
    """Folder of one run."""

    path: Path

    @classmethod
    def create(cls, root: str | Path, workload: Workload, settings: Mapping[str, Any]) -> FabricFolder:
        """Create a folder in `root`, named after time, workload and ranks."""
        require("pyarrow", "fabric")
        begun = datetime.now().astimezone()
        label = re.sub(r"[^A-Za-z0-9._]+", "-", workload.name).strip("-._")[-40:].strip("-._") or "run"
        name = f"{begun.strftime('%Y-%m-%d-%H%M%S')}-fabric-{label}-{workload.num_ranks}"
        root = Path(root)
        try:
            root.mkdir(parents=True, exist_ok=True)
            attempt = 0
            while True:
                path = root / (name if attempt == 0 else f"{name}-again{attempt}")
                try:
                    os.mkdir(path)
                    break
                except FileExistsError:
                    attempt += 1
        except OSError as error:
            raise UsageError(f"cannot create a run folder in {root}: {error.strerror}; choose another --root") from None
        content = {"begun": begun.isoformat(timespec="milliseconds"), "settings": settings}
        save_text(json.dumps({**content, "workload": workload.to_dict()}, indent=2) + "\n", path / "fabric.json")
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> FabricFolder:
        """Open the folder of a run; the error for a wrong path suggests the closest name."""
        path = Path(path)
        if not (path / "fabric.json").is_file():
            siblings = path.parent.iterdir() if path.parent.is_dir() else ()
            names = sorted((sibling.name for sibling in siblings if (sibling / "fabric.json").is_file()), reverse=True)
            if not names:
                raise UsageError(
                    f"{path} is not the folder of a fabric run, and {path.parent} contains none; create one with: "
                    "stagewright fabric run --sizes 1MiB"
                )
            raise UnknownName("fabric run", path.name, names, hint=f"(in {path.parent})")
        return cls(path)

    def write(self, workload: Workload, measured: Measurements, result: Mapping[str, Any]) -> None:
        """Write trials, steps and, last, the result."""
        names = [message.name for message in workload.messages]
        sizes = [message.num_bytes for message in workload.messages]
        write_trials(measured.trials, names, sizes, self.path / "trials.parquet")
        if any(len(steps) for steps in measured.steps):
            self._write_steps(measured)
        save_text(json.dumps(result, indent=2) + "\n", self.path / "result.json")

    def remove(self) -> None:
        """Remove the folder of a run that measured nothing."""
        shutil.rmtree(self.path, ignore_errors=True)

    def trials(self) -> TrialTable:
        return read_trials(self.path / "trials.parquet")

    def result(self) -> dict[str, Any]:
        try:
            return read_object(self.path / "result.json")
        except FileNotFoundError:
            raise UsageError(f"{self.path} has no result.json: the run is in progress or was killed") from None

    def _write_steps(self, measured: Measurements) -> None:
        import pyarrow
        from pyarrow import parquet

        steps = np.concatenate(measured.steps)
        columns: dict[str, Any] = {
            "rank": np.concatenate([np.full(len(rows), rank) for rank, rows in enumerate(measured.steps)])
        }
        columns |= {name: np.ascontiguousarray(steps[name]) for name in steps.dtype.names or ()}
        parquet.write_table(pyarrow.table(columns), self.path / "steps.parquet", compression="zstd")
