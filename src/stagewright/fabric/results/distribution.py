"""A set of times as percentiles: those that the samples can support, and no others.

A percentile is supported where at least two samples lie beyond it: p50 from 4 samples on, p90 from 20, p95 from 40, p99
from 200, p99.9 from 2000. With fewer it would be the maximum under another name, so it is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from stagewright.errors import UsageError

__all__ = ["PERCENTILES", "Distribution", "Threshold", "distribution_of", "samples_needed"]

# name → share of samples below it
PERCENTILES: dict[str, Fraction] = {
    "p50": Fraction(50, 100),
    "p90": Fraction(90, 100),
    "p95": Fraction(95, 100),
    "p99": Fraction(99, 100),
    "p99.9": Fraction(999, 1000),
}
_BEYOND = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Times of trials."""

    samples: int
    """How many."""
    percentiles: dict[str, float | None]
    """Percentile by name; None where there are too few samples."""
    min_s: float | None
    """The least, the mean and the largest; None where there is no sample."""
    mean_s: float | None
    max_s: float | None
    jitter_s: float | None
    """The mean difference between a trial and the next."""

    def value(self, name: str) -> float | None:
        """A percentile or `max`, by name."""
        return self.max_s if name == "max" else self.percentiles[name]

    def to_dict(self) -> dict[str, Any]:
        """With a field for each percentile: p50_s, …, p999_s."""
        return {
            "samples": self.samples,
            **{f"{name.replace('.', '')}_s": value for name, value in self.percentiles.items()},
            "min_s": self.min_s,
            "mean_s": self.mean_s,
            "max_s": self.max_s,
            "jitter_s": self.jitter_s,
        }


def samples_needed(name: str) -> int:
    """The least number of samples that supports a percentile."""
    return int(-(-_BEYOND // (1 - PERCENTILES[name])))


def distribution_of(times_s: npt.NDArray[np.float64]) -> Distribution:
    """The percentiles are times that were measured (nearest rank), in the order of trials for the jitter."""
    count = len(times_s)
    ordered = np.sort(times_s)
    found: dict[str, float | None] = {}
    for name, share in PERCENTILES.items():
        rank = int(-(-share * count // 1)) - 1
        found[name] = float(ordered[rank]) if count >= samples_needed(name) else None
    return Distribution(
        samples=count,
        percentiles=found,
        min_s=float(ordered[0]) if count else None,
        mean_s=float(times_s.mean()) if count else None,
        max_s=float(ordered[-1]) if count else None,
        jitter_s=float(np.abs(np.diff(times_s)).mean()) if count > 1 else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """What a preflight check allows: `p99=50ms`."""

    name: str
    """p50 … p99.9 or max."""
    limit_s: float
    """At most this."""

    @classmethod
    def parse(cls, text: str) -> Threshold:
        """Reads `p99=50ms`."""
        from stagewright.quantity import parse_s

        name, equals, limit = (part.strip() for part in text.partition("="))
        known = [*PERCENTILES, "max"]
        if not equals or name not in known:
            raise UsageError(f"{text!r} is not a threshold; write one of {', '.join(known)} and a time, like p99=50ms")
        return cls(name=name, limit_s=parse_s(limit))
