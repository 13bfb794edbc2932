"""Two runs side by side: how much slower or faster each layer is, and whether that is more than chance."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stagewright.errors import UsageError
from stagewright.fabric.run_folder import FabricFolder

__all__ = ["LayerChange", "compare_runs"]

_ROUNDS = 1000
_SAMPLES = 2000  # of each run in a round: enough for an interval


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """One layer in two runs."""

    # Its name.
    name: str
    # Its size.
    num_bytes: int
    # Medians.
    first_p50_s: float
    second_p50_s: float
    # Second over first, with the interval that holds it in 95 of 100 cases (bootstrap).
    ratio: float
    ratio_low: float
    ratio_high: float
    # 99th percentiles; None where there are too few samples.
    first_p99_s: float | None
    second_p99_s: float | None
    # Whether the interval leaves out 1.
    differs: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_runs(first: FabricFolder, second: FabricFolder, *, seed: int = 0) -> list[LayerChange]:
    """The layers of two runs, matched by name and size."""
    results, tables = (first.result(), second.result()), (first.trials(), second.trials())
    places = [{(layer["name"], layer["bytes"]): at for at, layer in enumerate(one["layers"])} for one in results]
    common = [key for key in places[0] if key in places[1]]
    if not common:
        raise UsageError(
            f"the runs have no layer in common: {first.path.name} sends {_sizes(results[0])}, "
            f"{second.path.name} sends {_sizes(results[1])} bytes"
        )
    found = []
    generator = np.random.default_rng(seed)
    for name, size in common:
        places_here = places[0][name, size], places[1][name, size]
        one, two = (table.durations(at) for table, at in zip(tables, places_here, strict=True))
        if not len(one) or not len(two):
            raise UsageError(f"{name} has {len(one)} and {len(two)} trials that count: both runs need some")
        ratios = np.sort(_medians(two, generator) / _medians(one, generator))
        low, high = float(ratios[int(0.025 * _ROUNDS)]), float(ratios[int(0.975 * _ROUNDS)])
        layers = results[0]["layers"][places_here[0]], results[1]["layers"][places_here[1]]
        found.append(
            LayerChange(
                name=name,
                num_bytes=size,
                first_p50_s=float(np.median(one)),
                second_p50_s=float(np.median(two)),
                ratio=float(np.median(two) / np.median(one)),
                ratio_low=low,
                ratio_high=high,
                first_p99_s=layers[0]["p99_s"],
                second_p99_s=layers[1]["p99_s"],
                differs=not low <= 1 <= high,
            )
        )
    return found


def _medians(times_s: npt.NDArray[np.float64], generator: np.random.Generator) -> npt.NDArray[np.float64]:
    count = min(len(times_s), _SAMPLES)
    drawn = generator.integers(0, len(times_s), (_ROUNDS, count))
    medians: npt.NDArray[np.float64] = np.median(times_s[drawn], axis=1)
    # Fewer drawn than there are would overstate the spread.
    middle, shrink = float(np.median(times_s)), float(np.sqrt(count / len(times_s)))
    shrunk: npt.NDArray[np.float64] = middle + (medians - middle) * shrink
    return shrunk


def _sizes(result: dict[str, Any]) -> str:
    return ", ".join(str(layer["bytes"]) for layer in result["layers"])
