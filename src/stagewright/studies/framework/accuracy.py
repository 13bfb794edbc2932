"""What accuracies over seeds can tell: the level of guessing, 95 % intervals, and one verdict in one wording. Pure.

    half-width² = (t · s / √seeds)²     s: deviation between seeds, pooled over everything trained on the task
                + (1.96 · σ / √samples)²   σ: of one evaluated sample

    difference to the reference, with its interval     all of it above −limit ─► keeps the accuracy
                                                       all of it below 0      ─► loses accuracy
                                                       else                   ─► inconclusive

A training that is no better than guessing says nothing about what was changed in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stagewright.studies.framework.rounds import SeedValues

CHANCE = {"cifar10": 10.0, "digits": 10.0, "mnist": 11.4, "rte": 52.7, "cola": 0.0}
"""Metric × 100 of a model that always predicts the most frequent class."""
LEARNED = 0.2
"""Share of the way from guessing to 100 that a training must have gone for a verdict."""
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # 95 %, 1 to 10 degrees of freedom
_NORMAL = 1.96

Verdict: TypeAlias = Literal["keeps", "loses", "unclear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyScale:
    """How exactly a task's accuracies are known."""

    task: str
    metric: str
    """accuracy or matthews."""
    num_judged: int | None
    """Evaluated samples; None: unknown."""
    deviation: float | None
    """Standard deviation between seeds, pooled; None with one seed."""
    degrees: int
    """Degrees of freedom of the deviation."""

    @property
    def chance(self) -> float:
        """What guessing the most frequent class reaches."""
        return CHANCE.get(self.task, 0.0)

    def half_width(self, values: SeedValues) -> float:
        """Half of the 95 % interval of a mean."""
        return math.sqrt(self._seed_variance(values) + self._sample_variance(values))

    def has_learned(self, values: SeedValues) -> bool:
        """Whether a training is well above guessing, by more than its interval."""
        if values.mean is None:
            return False
        gained = (values.mean - self.chance) / (100 - self.chance)
        return gained >= LEARNED and values.mean - self.half_width(values) > self.chance

    def difference_half_width(self, values: SeedValues, reference: SeedValues) -> float:
        """Half of the 95 % interval of the difference of two means."""
        return math.hypot(self.half_width(values), self.half_width(reference))

    def compare(self, values: SeedValues, reference: SeedValues, limit: float) -> Verdict:
        """Judge a training against its reference; a loss of `limit` points or less is none."""
        assert values.mean is not None
        assert reference.mean is not None
        difference, half = values.mean - reference.mean, self.difference_half_width(values, reference)
        if difference + half < 0:
            return "loses"
        return "keeps" if self.deviation is not None and difference - half >= -limit else "unclear"

    def shown(self, values: SeedValues) -> str:
        """Write "95.9 ± 0.4": the mean and half of its interval."""
        return "–" if values.mean is None else f"{values.mean:.1f} ± {self.half_width(values):.1f}"

    def _seed_variance(self, values: SeedValues) -> float:
        if self.deviation is None or not values.values:
            return 0.0
        quantile = _T[self.degrees - 1] if self.degrees <= len(_T) else 2.1 if self.degrees < 30 else _NORMAL
        return (quantile * self.deviation) ** 2 / len(values.values)

    def _sample_variance(self, values: SeedValues) -> float:
        if not self.num_judged or values.mean is None:
            return 0.0
        if self.metric == "matthews":
            return (_NORMAL * 100) ** 2 / self.num_judged
        share = min(1.0, max(0.0, values.mean / 100))
        return (_NORMAL * 100) ** 2 * share * (1 - share) / self.num_judged


def accuracy_scale(task: str, metric: str, trained: Iterable[SeedValues], num_judged: int | None) -> AccuracyScale:
    """Estimate how exactly the accuracies of a task are known from all its trainings."""
    groups = [group.values for group in trained if len(group.values) > 1]
    degrees = sum(len(group) - 1 for group in groups)
    deviation = math.sqrt(sum(_squares(group) for group in groups) / degrees) if degrees else None
    return AccuracyScale(task=task, metric=metric, num_judged=num_judged, deviation=deviation, degrees=degrees)


def _squares(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return sum((value - mean) ** 2 for value in values)
