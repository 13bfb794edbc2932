"""Latency distributions: percentiles, as far as the number of samples supports them.

A percentile needs at least two samples beyond it: p50 needs 4 samples, p90 20, p95 40, p99 200, p99.9 2000. With fewer
samples it would equal the maximum, so it is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from stagewright.errors import UsageError
from stagewright.quantity import parse_s

# name → fraction of samples below it
PERCENTILES: dict[str, Fraction] = {
    "p50": Fraction(50, 100),
    "p90": Fraction(90, 100),
    "p95": Fraction(95, 100),
    "p99": Fraction(99, 100),
    "p99.9": Fraction(999, 1000),
}
_SAMPLES_BEYOND = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Times of trials."""

    samples: int
    percentiles: dict[str, float | None]
    """Percentile by name; None with too few samples."""
    min_s: float | None
    """None without samples, like mean and maximum."""
    mean_s: float | None
    max_s: float | None
    jitter_s: float | None
    """Mean difference between consecutive trials."""

    def value(self, name: str) -> float | None:
        """Return a percentile or `max` by name."""
        return self.max_s if name == "max" else self.percentiles[name]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object, with a key per percentile: p50_s, …, p999_s."""
        return {
            "samples": self.samples,
            **{f"{name.replace('.', '')}_s": value for name, value in self.percentiles.items()},
            "min_s": self.min_s,
            "mean_s": self.mean_s,
            "max_s": self.max_s,
            "jitter_s": self.jitter_s,
        }


def min_samples(name: str) -> int:
    """Return the number of samples that a percentile needs."""
    return int(-(-_SAMPLES_BEYOND // (1 - PERCENTILES[name])))


def distribution_of(times_s: npt.NDArray[np.float64]) -> Distribution:
    """Compute percentiles (nearest rank) and jitter of times in trial order."""
    count = len(times_s)
    ordered = np.sort(times_s)
    percentiles: dict[str, float | None] = {}
    for name, fraction in PERCENTILES.items():
        rank = int(-(-fraction * count // 1)) - 1
        percentiles[name] = float(ordered[rank]) if count >= min_samples(name) else None
    return Distribution(
        samples=count,
        percentiles=percentiles,
        min_s=float(ordered[0]) if count else None,
        mean_s=float(times_s.mean()) if count else None,
        max_s=float(ordered[-1]) if count else None,
        jitter_s=float(np.abs(np.diff(times_s)).mean()) if count > 1 else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A limit on a percentile: `p99=50ms`."""

    name: str
    """p50 … p99.9 or max."""
    limit_s: float

    @classmethod
    def parse(cls, text: str) -> Threshold:
        """Parse `p99=50ms`."""
        name, equals, limit = (part.strip() for part in text.partition("="))
        names = [*PERCENTILES, "max"]
        if not equals or name not in names:
            raise UsageError(f"{text!r} is not a threshold; write {', '.join(names)} and a time, like p99=50ms")
        return cls(name=name, limit_s=parse_s(limit))
