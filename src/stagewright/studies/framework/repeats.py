"""Repeat a run whose result is not plausible, and decide which of its measurements counts.

    steps vary by more than a fifth                         ─► the run again; the steadier of both counts
    less than a third or more than three times the forecast ─► the run again; the one closer to the forecast counts
    more than n × on n devices                              ─► the baseline and the run again; the second counts
    two measurements differ by a factor of two              ─► a third; the middle one counts

What was repeated is saved with the reason: answers name it. Whether the result is believed in the end is decided where
speed-ups are computed (`rounds`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stagewright.runs.result import RunResult

UNSTEADY = 0.2
"""Half of the interquartile range of a run's steps, relative to the median, beyond which it is repeated."""
SUPERLINEAR = 1.1
"""A speed-up beyond this multiple of the number of devices is not believed: the baseline was disturbed."""
FAR_APART = 2.0
"""Factor between two measurements of the same plan beyond which a third decides."""
UNEXPECTED = 3.0
"""Factor between a measurement and its forecast beyond which it is repeated."""

Cause: TypeAlias = Literal["", "unsteady", "unexpected", "superlinear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What is known about a run before it starts."""

    num_devices: int = 1
    baseline_rate: float | None = None
    """Samples/s of the single-device baseline."""
    forecast_rate: float | None = None
    """Samples/s by forecast."""

    def cause(self, run: RunResult) -> Cause:
        """Why a run should be repeated; empty if it is plausible."""
        rate = run.samples_per_s
        if not rate:
            return ""
        if self.baseline_rate and rate > SUPERLINEAR * self.num_devices * self.baseline_rate:
            return "superlinear"
        if self.forecast_rate and rate_ratio((rate, self.forecast_rate)) >= UNEXPECTED:
            return "unexpected"
        return "unsteady" if run.relative_spread > UNSTEADY else ""

    def reason(self, cause: Cause, run: RunResult) -> str:
        """The cause with its numbers."""
        rate = run.samples_per_s
        if cause == "superlinear":
            return f"{rate / (self.baseline_rate or rate):.2f} × on {self.num_devices} devices is more than they reach"
        if cause == "unexpected":
            return f"{rate:.1f} samples/s, where {self.forecast_rate or 0.0:.1f} were forecast"
        return f"its steps varied by ±{run.relative_spread:.0%}".replace("%", " %")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The run that counts, and what came before it."""

    run: RunResult
    left_out: tuple[RunResult, ...] = ()
    """Other runs of the same plan and of the baseline."""
    reason: str = ""
    """Why it was repeated."""
    rates: tuple[float, ...] = ()
    """Samples/s of every run of the plan, in order."""
    baseline_rate: float | None = None
    """Samples/s of a baseline that was repeated with it."""


def rate_ratio(rates: Sequence[float]) -> float:
    """Return the factor between the fastest and the slowest."""
    return max(rates) / min(rates)


def measure(
    run: Callable[[], RunResult],
    expected: Expectation | None,
    *,
    run_baseline: Callable[[], RunResult] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Measurement:
    """Run a plan once, or until its result is plausible: at most three times.

    Without an expectation, its speed does not matter: once.
    """
    runs = [run()]
    if expected is None:
        return Measurement(run=runs[0])
    cause = expected.cause(runs[0])
    if not cause:
        return Measurement(run=runs[0])
    reason = expected.reason(cause, runs[0])
    note(f"{reason}: repeating the run")
    baselines = [run_baseline()] if cause == "superlinear" and run_baseline is not None else []
    runs.append(run())
    rates = [row.samples_per_s for row in runs]
    if rate_ratio(rates) >= FAR_APART:
        note(f"{rates[0]:.1f} and {rates[1]:.1f} samples/s: a third run decides")
        runs.append(run())
        chosen = sorted(runs, key=lambda row: row.samples_per_s)[1]
    elif cause == "superlinear":
        chosen = runs[1]
    elif cause == "unexpected":
        forecast = expected.forecast_rate or rates[0]
        chosen = min(runs, key=lambda row: rate_ratio((row.samples_per_s, forecast)))
    else:
        chosen = min(runs, key=lambda row: row.relative_spread)
    return Measurement(
        run=chosen,
        left_out=tuple(row for row in runs if row is not chosen),
        reason=reason,
        rates=tuple(row.samples_per_s for row in runs),
        baseline_rate=baselines[0].samples_per_s if baselines else None,
    )
