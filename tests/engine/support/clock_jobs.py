"""What workers of the pool do in the tests of clocks."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stagewright.engine.worker import clock
from stagewright.runs.worker_folder import WorkerFolder
from stagewright.spec.plan import Mesh


def exchanged(rank: int, identities: list[str], ahead_s: float = 0.0) -> tuple[float, float]:
    """Offset and error of this worker, whose machine has that name; worker 1's clock may be ahead."""
    real: Any = clock.time
    if rank == 1:
        clock.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() + ahead_s)  # type: ignore[assignment]
    try:
        return clock.exchange(rank, len(identities), identities[rank])
    finally:
        clock.time = real


def written(rank: int, folder: str) -> None:
    """Write this worker's clock."""
    context: Any = SimpleNamespace(rank=rank, mesh=Mesh(data=2))
    clock.write_clock(context, WorkerFolder(path=Path(folder) / str(rank)))
