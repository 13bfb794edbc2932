"""How far forecasts can be trusted: their error on the cases that were also measured. Pure.

measured ÷ forecast of the measured cases    within 10 %          ─► other forecasts are shown as they are
                                             all off alike        ─► they are corrected by that ratio
                                             off in different ways ─► they are withheld
                                             off, machine busy    ─► they are withheld
                                             none                 ─► they are shown as unchecked
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stagewright.studies.framework.phrases import percent

TRUSTED = 0.10
"""Largest error of a forecast on a measured case up to which others are shown as they are."""

Verdict: TypeAlias = Literal["trusted", "corrected", "withheld", "unchecked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastCheck:
    """The forecasts of a study compared with its measurements."""

    ratios: tuple[float, ...] = ()
    """Measured ÷ forecast of each case that was measured."""
    busy: str = ""
    """What shows that the machine was busy, so that a ratio may be noise; "" if it was not."""
    is_disturbed: bool = False
    """Whether every measured case was left out as impossible: then the baseline is wrong, to which forecasts refer."""

    @property
    def verdict(self) -> Verdict:
        """What is done with the forecasts of cases that were not measured."""
        if self.is_disturbed:
            return "withheld"
        if not self.ratios:
            return "unchecked"
        if all(abs(1 / ratio - 1) <= TRUSTED for ratio in self.ratios):
            return "trusted"
        middle = statistics.median(self.ratios)
        if self.busy:
            return "withheld"
        return "corrected" if all(abs(ratio / middle - 1) <= TRUSTED for ratio in self.ratios) else "withheld"

    @property
    def error(self) -> float:
        """How far off the forecasts of the measured cases were: a change that is forecast to gain less is not known."""
        return max((abs(1 / ratio - 1) for ratio in self.ratios), default=0.0)

    def corrected(self, forecast: float) -> float | None:
        """Return the forecast, corrected where the measured cases are all off alike; None: withheld."""
        verdict = self.verdict
        if verdict == "withheld":
            return None
        return forecast * statistics.median(self.ratios) if verdict == "corrected" else forecast

    @property
    def sentence(self) -> str:
        """How far off the measured cases were, and what follows for the others; it follows a name and a colon."""
        if self.is_disturbed:
            return "forecasts are withheld: they refer to the same baseline, which was disturbed."
        if not self.ratios:
            return "no forecast was checked by a run, so they are unverified."
        errors = sorted(1 / ratio - 1 for ratio in self.ratios)
        low, high = (_signed_percent(error) for error in (errors[0], errors[-1]))
        cases = f"on the {len(errors)} measured cases" if len(errors) > 1 else "where it was measured,"
        head = f"{cases} the forecast speed-up was off by "
        head += low if low == high else f"{low} to {high}"
        if self.verdict == "trusted":
            return f"{head}."
        if self.verdict == "corrected":
            factor = statistics.median(self.ratios)
            return f"{head}: the forecasts of the others are corrected by the measured ratio, {factor:.2f}."
        reason = f"measured while {self.busy}" if self.busy else "in different ways"
        return f"{head}, more than {percent(TRUSTED)} and {reason}: the forecasts of the others are withheld."


def _signed_percent(error: float) -> str:
    """Write an error as "+4 %", "−3 %" or "0 %"."""
    points = round(100 * error)
    return f"{points:+d} %".replace("-", "−") if points else "0 %"


def check_forecasts(
    pairs: Sequence[tuple[float | None, float | None]], *, busy: str = "", is_disturbed: bool = False
) -> ForecastCheck:
    """Compare (measured, forecast) pairs; pairs in which one is unknown do not count.

    Args:
        pairs: Speed-ups of the cases that were measured.
        busy: What shows that the machine was busy.
        is_disturbed: Whether measured speed-ups were left out as impossible.
    """
    ratios = tuple(measured / forecast for measured, forecast in pairs if measured and forecast)
    return ForecastCheck(ratios=ratios, busy=busy, is_disturbed=is_disturbed and not ratios)
