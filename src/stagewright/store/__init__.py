"""The run folder and the index over runs."""

from __future__ import annotations

from stagewright.store.index import RunIndex, RunRow
from stagewright.store.run import RunFolder
from stagewright.store.worker import WorkerFolder

__all__ = ["RunFolder", "RunIndex", "RunRow", "WorkerFolder"]
