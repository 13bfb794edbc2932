"""What the workers of a run did in its median step: time by category, and counts of actions and operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stagewright.runs.run_folder import RunFolder
from stagewright.trace.breakdown import breakdown
from stagewright.trace.operators import compare_workers, read_operators
from stagewright.trace.read import read_trace


def read_breakdown(run: str | Path) -> list[dict[str, Any]]:
    """Read where each worker's time went: six categories that add up to its step."""
    trace = read_trace(RunFolder.open(run))
    return [share.to_dict() for share in breakdown(trace, trace.median_step)]


def read_ideal(run: str | Path, *, batch: int, largest_unit: float, baseline_s: float | None) -> dict[str, Any]:
    """Compute the ideal systems of a run's median step from its own events."""
    from stagewright.trace.ideal import ideal_step

    trace = read_trace(RunFolder.open(run))
    ideal = ideal_step(trace, trace.median_step, batch=batch, largest_unit=largest_unit, baseline_s=baseline_s)
    return ideal.to_dict()


def read_counts(run: str | Path) -> list[dict[str, Any]]:
    """Count each worker's actions by kind, with their seconds and bytes."""
    trace = read_trace(RunFolder.open(run))
    counts = []
    for worker in trace.workers:
        kinds: dict[str, dict[str, float]] = {}
        for event in worker.of_step(trace.median_step):
            entry = kinds.setdefault(event.kind, {"count": 0, "seconds": 0.0, "bytes": 0})
            entry["count"] += 1
            entry["seconds"] += event.seconds
            entry["bytes"] += event.bytes or 0
        counts.append({"worker": worker.rank, "stages": list(worker.stages), "kinds": kinds})
    return counts


def compare_operators(run: str | Path) -> dict[str, Any]:
    """Run one more step of a run's plan under torch's profiler; compare the operators of its first two workers."""
    from stagewright.engine.jobs.operators import record_operators

    folder = RunFolder.open(run)
    record_operators(folder)
    comparison = compare_workers(read_operators(folder), 0, 1, folder.plan())
    return {
        "is_same": comparison.is_same,
        "sentence": comparison.sentence,
        "parts": {part.action: [part.num_first, part.num_second] for part in comparison.parts},
    }
