"""What the workers of a run did in its median step, from its events: how long for what, and how often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stagewright.store.run import RunFolder
from stagewright.trace.breakdown import breakdown
from stagewright.trace.read import read_trace

__all__ = ["counts_of", "shares_of"]


def shares_of(run: str | Path) -> list[dict[str, Any]]:
    """Where each worker's time went: six parts that add up to its step."""
    trace = read_trace(RunFolder.open(run))
    return [share.to_dict() for share in breakdown(trace, trace.median_step)]


def counts_of(run: str | Path) -> list[dict[str, Any]]:
    """How often each worker did what, how long that took and how many bytes it was."""
    trace = read_trace(RunFolder.open(run))
    found = []
    for worker in trace.workers:
        kinds: dict[str, dict[str, float]] = {}
        for event in worker.of_step(trace.median_step):
            entry = kinds.setdefault(event.kind, {"count": 0, "seconds": 0.0, "bytes": 0})
            entry["count"] += 1
            entry["seconds"] += event.seconds
            entry["bytes"] += event.bytes or 0
        found.append({"worker": worker.rank, "stages": list(worker.stages), "kinds": kinds})
    return found
