"""The folder of a fabric run: what was sent, the raw trials, the result.

runs/2026-11-15-031502-fabric-mlp-mnist-4/
  fabric.json          the workload and how it was sent, before the first trial
  trials.parquet       a row for each trial, message and rank
  steps.parquet        when each step was sent and received, as far as it was kept
  result.json          what was shown; without it the run goes on, or was killed
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
from stagewright.fabric.ranks.coordinator import Measured
from stagewright.fabric.traffic.workload import Workload
from stagewright.fabric.trials import TrialTable, read_trials, write_trials
from stagewright.files.atomic import save_text

__all__ = ["FabricFolder"]


@dataclass(frozen=True, slots=True)
class FabricFolder:
    """One run's folder."""

    path: Path
    """Where it is."""

    @classmethod
    def create(cls, root: str | Path, workload: Workload, settings: Mapping[str, Any]) -> FabricFolder:
        """A new folder under `root`, named by time, workload and ranks."""
        begun = datetime.now().astimezone()
        plain = re.sub(r"[^A-Za-z0-9._]+", "-", workload.name).strip("-._")[-40:].strip("-._") or "run"
        name = f"{begun.strftime('%Y-%m-%d-%H%M%S')}-fabric-{plain}-{workload.num_ranks}"
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
            raise UsageError(f"can't create a run folder in {root}: {error.strerror}; choose another --root") from None
        content = {"begun": begun.isoformat(timespec="milliseconds"), "settings": settings}
        save_text(json.dumps({**content, "workload": workload.to_dict()}, indent=2) + "\n", path / "fabric.json")
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> FabricFolder:
        """The folder of a run that exists; where it does not, the error offers the nearest one."""
        path = Path(path)
        if not (path / "fabric.json").is_file():
            beside = path.parent.iterdir() if path.parent.is_dir() else ()
            known = sorted((one.name for one in beside if (one / "fabric.json").is_file()), reverse=True)
            if not known:
                raise UsageError(
                    f"{path} is not the folder of a fabric run, and there is none in {path.parent}; make one with: "
                    "stagewright fabric run --sizes 1MiB"
                )
            raise UnknownName("fabric run", path.name, known, hint=f"(in {path.parent})")
        return cls(path)

    def write(self, workload: Workload, measured: Measured, result: Mapping[str, Any]) -> None:
        """Trials, steps, and last the result."""
        names = [message.name for message in workload.messages]
        sizes = [message.num_bytes for message in workload.messages]
        write_trials(measured.trials, names, sizes, self.path / "trials.parquet")
        if any(len(steps) for steps in measured.steps):
            self._write_steps(measured)
        save_text(json.dumps(result, indent=2) + "\n", self.path / "result.json")

    def remove(self) -> None:
        """As if it had never been: nothing was measured."""
        shutil.rmtree(self.path, ignore_errors=True)

    def trials(self) -> TrialTable:
        """The raw trials."""
        return read_trials(self.path / "trials.parquet")

    def result(self) -> dict[str, Any]:
        """What was shown."""
        try:
            content: dict[str, Any] = json.loads((self.path / "result.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(f"{self.path} has no result.json: the run goes on, or was killed") from None
        except (OSError, ValueError) as error:
            raise UsageError(f"can't read {self.path / 'result.json'}: {error}") from None
        return content

    def _write_steps(self, measured: Measured) -> None:
        import pyarrow
        from pyarrow import parquet

        whole = np.concatenate(measured.steps)
        columns: dict[str, Any] = {
            "rank": np.concatenate([np.full(len(own), rank) for rank, own in enumerate(measured.steps)])
        }
        columns |= {name: np.ascontiguousarray(whole[name]) for name in whole.dtype.names or ()}
        parquet.write_table(pyarrow.table(columns), self.path / "steps.parquet", compression="zstd")
