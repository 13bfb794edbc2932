"""Runs that are repeated in several rounds or with several seeds: speed-ups by round, accuracy over seeds. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagewright.runs.baseline import fastest_variant
from stagewright.runs.result import RunResult
from stagewright.studies.framework.phrases import spread


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedValues:
    """The accuracy that the same training reaches with several seeds."""

    values: tuple[float, ...]
    """Metric × 100 after the last epoch, of each seed."""

    @property
    def mean(self) -> float | None:
        """Mean over seeds; None without a value."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds; None with one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def shown(self) -> str:
        """95.9 ± 0.14; 95.9 with one seed, – without a value."""
        if self.mean is None:
            return "–"
        return f"{self.mean:.1f}" + (f" ± {self.deviation:.2f}" if self.deviation is not None else "")


def read_values(trained: Iterable[Mapping[str, Any] | None]) -> tuple[float, ...]:
    """Read the metric × 100 after the last epoch of each training that succeeded."""
    return tuple(100 * row["epochs"][-1][row["metric"]] for row in trained if row is not None)


def read_rounds(results: Mapping[str, Any], part: str, rounds: int) -> dict[int, RunResult]:
    """Read the runs PART-1, PART-2, … by round; rounds without a run are left out.

    So are rounds, of three or more, whose rate is less than a fifth of the median or more than five times as high:
    something else had the machine, or nothing else for once. Smaller changes of pace cancel out in ratios.
    """
    rows = {number: results.get(f"{part}-{number}") for number in range(1, rounds + 1)}
    runs = {
        number: RunResult.from_dict(row) for number, row in rows.items() if row is not None and "samples_per_s" in row
    }
    if len(runs) < 3:
        return runs
    median = statistics.median(run.samples_per_s for run in runs.values())
    return {number: run for number, run in runs.items() if median / 5 <= run.samples_per_s <= 5 * median}


SUPERLINEAR = 1.1
"""A measured speed-up beyond this multiple of the number of devices is not believed: the baseline was disturbed."""


def speedups_by_round(
    runs: Mapping[int, RunResult], baselines: Mapping[int, RunResult], num_devices: int | None = None
) -> tuple[float, ...]:
    """Divide the throughput of each round by the baseline's; empty if any run failed its parity check.

    With `num_devices`, ratios that so many devices can't reach are left out: see `implausible_speedups`.
    """
    most = math.inf if num_devices is None else SUPERLINEAR * num_devices
    return tuple(ratio for ratio in _ratios(runs, baselines) if ratio <= most)


def implausible_speedups(
    runs: Mapping[int, RunResult], baselines: Mapping[int, RunResult], num_devices: int
) -> tuple[float, ...]:
    """Return the ratios that are left out because so many devices can't reach them."""
    return tuple(ratio for ratio in _ratios(runs, baselines) if ratio > SUPERLINEAR * num_devices)


def range_text(speedups: Sequence[float], implausible: Sequence[float], *, equal: bool) -> str:
    """Write the range of the speed-ups, or why there is none, and what was left out."""
    if not equal:
        return "parity check failed"
    left_out = ", ".join(f"{ratio:.2f}" for ratio in implausible)
    return " ".join(
        text for text in (spread(speedups), f"(left out: {left_out}, more than devices)" if left_out else "") if text
    )


def _ratios(runs: Mapping[int, RunResult], baselines: Mapping[int, RunResult]) -> tuple[float, ...]:
    if not all(run.equal for run in runs.values()):
        return ()
    return tuple(
        run.samples_per_s / baselines[number].samples_per_s for number, run in runs.items() if number in baselines
    )


def choose_baseline(results: Mapping[str, Any], parts: Iterable[str], rounds: int) -> str | None:
    """Return which of several single-device parts is the baseline: the fastest, by its median over rounds."""
    runs = {part: read_rounds(results, part, rounds) for part in parts}
    return fastest_variant(
        {part: [1 / run.samples_per_s for run in found.values() if run.samples_per_s] for part, found in runs.items()}
    )


def median_rate(runs: Mapping[int, RunResult]) -> float:
    """The median throughput over rounds."""
    return statistics.median(run.samples_per_s for run in runs.values())
