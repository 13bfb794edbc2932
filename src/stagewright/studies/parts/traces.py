"""What the workers of a run did in its median step, from its events: how long for what, and how often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stagewright.runs.run_folder import RunFolder
from stagewright.trace.breakdown import breakdown
from stagewright.trace.operators import compare_workers, read_operators
from stagewright.trace.read import read_trace

__all__ = ["compared_operators", "counts_of", "shares_of"]


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


def compared_operators(run: str | Path) -> dict[str, Any]:
    """Run a run's plan for one step more with torch's profiler; what its first two workers executed, side by side."""
    from stagewright.engine.jobs.operators import record_operators

    folder = RunFolder.open(run)
    record_operators(folder)
    found = compare_workers(read_operators(folder), 0, 1, folder.plan())
    return {
        "is_same": found.is_same,
        "sentence": found.sentence,
        "parts": {part.action: [part.num_first, part.num_second] for part in found.parts},
    }
