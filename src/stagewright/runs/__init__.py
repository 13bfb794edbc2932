"""Run folders, results and the index of runs."""

from __future__ import annotations

from stagewright.runs.index import RunIndex, RunRow
from stagewright.runs.result import RunResult
from stagewright.runs.run_folder import RunFolder
from stagewright.runs.worker_folder import WorkerFolder

__all__ = ["RunFolder", "RunIndex", "RunResult", "RunRow", "WorkerFolder"]
