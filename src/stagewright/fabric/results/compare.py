"""Comparison of two runs: the ratio of each layer's times and whether it is statistically significant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stagewright.errors import UsageError
from stagewright.fabric.results.run_folder import FabricFolder

_RESAMPLES = 1000
_MAX_SAMPLES = 5000  # per run in a resample


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """One layer in two runs."""

    name: str
    num_bytes: int
    first_p50_s: float
    second_p50_s: float
    ratio: float
    """Median of the second run over that of the first, with its 95 % bootstrap interval."""
    ratio_low: float
    ratio_high: float
    differs: bool
    """Whether the interval excludes 1."""
    first_p99_s: float | None
    """Tail latencies; these and all following fields are None if there are too few samples."""
    second_p99_s: float | None
    tail_ratio: float | None
    """p99 of the second run over that of the first."""
    tail_ratio_low: float | None
    tail_ratio_high: float | None
    tail_differs: bool | None


def compare_runs(first: FabricFolder, second: FabricFolder) -> list[LayerChange]:
    """Compare the layers of two runs, matched by name and size."""
    results, tables = (first.result(), second.result()), (first.trials(), second.trials())
    indices = [
        {(layer["name"], layer["bytes"]): index for index, layer in enumerate(result["layers"])} for result in results
    ]
    common = [key for key in indices[0] if key in indices[1]]
    if not common:
        raise UsageError(
            f"the runs have no layer in common: {first.path.name} sends {_sizes(results[0])}, "
            f"{second.path.name} sends {_sizes(results[1])} bytes"
        )
    changes = []
    generator = np.random.default_rng(0)
    for name, size in common:
        positions = indices[0][name, size], indices[1][name, size]
        times = [table.durations(index) for table, index in zip(tables, positions, strict=True)]
        if not len(times[0]) or not len(times[1]):
            raise UsageError(f"{name} has {len(times[0])} and {len(times[1])} valid trials; both runs need some")
        ratio, low, high = _ratio(times[0], times[1], 0.5, generator)
        tails = [result["layers"][index]["p99_s"] for result, index in zip(results, positions, strict=True)]
        tail = None if None in tails else _ratio(times[0], times[1], 0.99, generator)
        changes.append(
            LayerChange(
                name=name,
                num_bytes=size,
                first_p50_s=float(np.median(times[0])),
                second_p50_s=float(np.median(times[1])),
                ratio=ratio,
                ratio_low=low,
                ratio_high=high,
                differs=not low <= 1 <= high,
                first_p99_s=tails[0],
                second_p99_s=tails[1],
                tail_ratio=None if tail is None else tail[0],
                tail_ratio_low=None if tail is None else tail[1],
                tail_ratio_high=None if tail is None else tail[2],
                tail_differs=None if tail is None else not tail[1] <= 1 <= tail[2],
            )
        )
    return changes


def _ratio(
    first: npt.NDArray[np.float64], second: npt.NDArray[np.float64], quantile: float, generator: np.random.Generator
) -> tuple[float, float, float]:
    """Return the ratio of a quantile of the second run to that of the first, with its 95 % bootstrap interval."""
    resampled = [
        np.quantile(
            times[generator.integers(0, len(times), (_RESAMPLES, min(len(times), _MAX_SAMPLES)))], quantile, axis=1
        )
        for times in (first, second)
    ]
    ratio = float(np.quantile(second, quantile) / np.quantile(first, quantile))
    ratios = np.sort(resampled[1] / resampled[0])
    return ratio, min(ratio, float(ratios[int(0.025 * _RESAMPLES)])), max(ratio, float(ratios[int(0.975 * _RESAMPLES)]))


def _sizes(result: dict[str, Any]) -> str:
    return ", ".join(str(layer["bytes"]) for layer in result["layers"])
