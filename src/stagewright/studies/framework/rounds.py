"""Runs that are repeated in several rounds, and their speed-ups over the baseline of the same round. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from stagewright.runs.result import RunResult


def read_rounds(results: Mapping[str, Any], part: str, rounds: int) -> dict[int, RunResult]:
    """Read the runs PART-1, PART-2, … by round; rounds without a run are left out."""
    rows = {number: results.get(f"{part}-{number}") for number in range(1, rounds + 1)}
    return {
        number: RunResult.from_dict(row) for number, row in rows.items() if row is not None and "samples_per_s" in row
    }


def speedups_by_round(runs: Mapping[int, RunResult], baselines: Mapping[int, RunResult]) -> tuple[float, ...]:
    """Divide the throughput of each round by the baseline's; empty if any run failed its parity check."""
    if not all(run.equal for run in runs.values()):
        return ()
    return tuple(
        run.samples_per_s / baselines[number].samples_per_s for number, run in runs.items() if number in baselines
    )


def median_rate(runs: Mapping[int, RunResult]) -> float:
    """The median throughput over rounds."""
    return statistics.median(run.samples_per_s for run in runs.values())
