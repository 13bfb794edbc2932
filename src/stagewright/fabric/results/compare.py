"""Two runs side by side: how much slower or faster each layer is, and whether that is more than chance."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stagewright.errors import UsageError
from stagewright.fabric.results.run_folder import FabricFolder

__all__ = ["LayerChange", "compare_runs"]

_ROUNDS = 1000
_SAMPLES = 5000  # of each run in a round: with more, the interval is wider than it need be


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """One layer in two runs."""

    name: str
    """Its name."""
    num_bytes: int
    """Its size."""
    first_p50_s: float
    """Medians."""
    second_p50_s: float
    ratio: float
    """Second over first, with the interval that holds it in 95 of 100 cases (bootstrap)."""
    ratio_low: float
    ratio_high: float
    differs: bool
    """Whether the interval leaves out 1."""
    first_p99_s: float | None
    """99th percentiles; None where there are too few samples, as for all that follow."""
    second_p99_s: float | None
    tail_ratio: float | None
    """The same of the tail."""
    tail_ratio_low: float | None
    tail_ratio_high: float | None
    tail_differs: bool | None

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
        ratio, low, high = _ratio(one, two, 0.5, generator)
        tails = [layers["layers"][at]["p99_s"] for layers, at in zip(results, places_here, strict=True)]
        tail = None if None in tails else _ratio(one, two, 0.99, generator)
        found.append(
            LayerChange(
                name=name,
                num_bytes=size,
                first_p50_s=float(np.median(one)),
                second_p50_s=float(np.median(two)),
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
    return found


def _ratio(
    first: npt.NDArray[np.float64], second: npt.NDArray[np.float64], share: float, generator: np.random.Generator
) -> tuple[float, float, float]:
    """A percentile of the second over that of the first, and the interval that holds 95 of 100 drawn again."""
    drawn = [
        np.quantile(times[generator.integers(0, len(times), (_ROUNDS, min(len(times), _SAMPLES)))], share, axis=1)
        for times in (first, second)
    ]
    ratio = float(np.quantile(second, share) / np.quantile(first, share))
    ratios = np.sort(drawn[1] / drawn[0])
    return ratio, min(ratio, float(ratios[int(0.025 * _ROUNDS)])), max(ratio, float(ratios[int(0.975 * _ROUNDS)]))


def _sizes(result: dict[str, Any]) -> str:
    return ", ".join(str(layer["bytes"]) for layer in result["layers"])
