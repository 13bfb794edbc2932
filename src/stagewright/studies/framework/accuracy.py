"""What accuracies over seeds can tell: the level of guessing, 95 % intervals, and one verdict in one wording. Pure.

    mean         half-width² = (t · s / √seeds)²                s: deviation between seeds, pooled over everything
                             + (1.96 · σ / √samples)²              trained on the task; σ: of one evaluated sample

    difference   half-width² = of the differences between trainings with the same seed, from the same initial weights:
                               the smaller of t · s / √seeds    s: their own deviation
                                          and t · r · √(2 / seeds)    r: what neither the seed nor the kind of training
                                                                         explains, pooled over all that learned alike;
                                                                         for one that did not, the pooled deviation
                               (each at 97.5 %, because of two one is taken; r at least its own deviation ÷ √2)
                             + (1.96 · σ / √samples)²           σ: of the difference on one sample; at least as if 3
                                                                   samples differed

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

from stagewright.studies.framework.phrases import signed
from stagewright.studies.framework.rounds import SeedValues

CHANCE = {"cifar10": 10.0, "digits": 10.0, "mnist": 11.4, "rte": 52.7, "cola": 0.0}
"""Metric × 100 of a model that always predicts the most frequent class."""
LEARNED = 0.2
"""Share of the way from guessing to 100 that a training must have gone for a verdict."""
_ALIKE = 0.5
"""Share of what the best training learned above which others vary as it does."""
_NORMAL = 1.96
_QUANTILES = {  # of Student's t with 1, 2, … degrees of freedom, and of the normal distribution
    0.975: ((12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23), _NORMAL),
    0.9875: ((25.45, 6.21, 4.18, 3.50, 3.16, 2.97, 2.84, 2.75, 2.69, 2.63), 2.241),
}

Verdict: TypeAlias = Literal["keeps", "loses", "unclear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """By how many points the accuracy of a training differs from that of its reference."""

    points: float
    half_width: float
    """Half of the 95 % interval."""

    @property
    def is_significant(self) -> bool:
        """Whether the interval does not contain 0."""
        return abs(self.points) > self.half_width

    @property
    def shown(self) -> str:
        """−0.7 ± 0.2."""
        return f"{signed(self.points)} ± {self.half_width:.1f}"


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
    alike: float
    """Accuracy from which trainings vary as the best one does."""
    residual: float | None
    """Deviation of these that neither the seed nor the kind of training explains; None: unknown."""
    residual_degrees: int
    """Its degrees of freedom."""

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

    def difference(self, values: SeedValues, reference: SeedValues) -> Difference:
        """Return the difference of two trainings, from the seeds that both have."""
        from stagewright.studies.framework.sample_differences import sample_half_width  # imports numpy

        first, second = values.by_seed, reference.by_seed
        common = [seed for seed in first if seed in second]
        if not common:
            assert values.mean is not None
            assert reference.mean is not None
            return Difference(
                points=values.mean - reference.mean,
                half_width=math.hypot(self.half_width(values), self.half_width(reference)),
            )
        differences = [first[seed].value - second[seed].value for seed in common]
        pairs = [(first[seed].predictions, second[seed].predictions) for seed in common]
        samples = sample_half_width(self.metric, pairs)
        if samples is None:
            samples = math.sqrt(self._sample_variance(values) + self._sample_variance(reference))
        seeds = self._seeds_of_difference(differences, min(values.mean or 0.0, reference.mean or 0.0))
        return Difference(points=statistics.fmean(differences), half_width=math.hypot(seeds, samples))

    def compare(self, values: SeedValues, reference: SeedValues, limit: float) -> Verdict:
        """Judge a training against its reference; a loss of `limit` points or less is none."""
        difference = self.difference(values, reference)
        if difference.points + difference.half_width < 0:
            return "loses"
        is_kept = self.deviation is not None and difference.points - difference.half_width >= -limit
        return "keeps" if is_kept else "unclear"

    def shown(self, values: SeedValues) -> str:
        """Write "95.9 ± 0.4": the mean and half of its interval."""
        return "–" if values.mean is None else f"{values.mean:.1f} ± {self.half_width(values):.1f}"

    def _seed_variance(self, values: SeedValues) -> float:
        if self.deviation is None or not values.values:
            return 0.0
        return (_quantile(0.975, self.degrees) * self.deviation) ** 2 / len(values.values)

    def _sample_variance(self, values: SeedValues) -> float:
        if not self.num_judged or values.mean is None:
            return 0.0
        if self.metric == "matthews":
            return (_NORMAL * 100) ** 2 / self.num_judged
        share = min(1.0, max(0.0, values.mean / 100))
        return (_NORMAL * 100) ** 2 * share * (1 - share) / self.num_judged

    def _seeds_of_difference(self, differences: Sequence[float], lower: float) -> float:
        """Half of the interval that seeds cause; `lower` is the lower of the two accuracies."""
        count = len(differences)
        if self.deviation is None:
            return 0.0
        if count < 2:
            return _quantile(0.975, self.degrees) * self.deviation * math.sqrt(2)
        own = statistics.stdev(differences) / math.sqrt(2)
        pooled, degrees = self.deviation, self.degrees
        if self.residual is not None and lower >= self.alike:
            pooled, degrees = self.residual, self.residual_degrees
        return math.sqrt(2 / count) * min(
            _quantile(0.9875, count - 1) * own, _quantile(0.9875, degrees) * max(pooled, own)
        )


def accuracy_scale(task: str, metric: str, trained: Iterable[SeedValues], num_judged: int | None) -> AccuracyScale:
    """Estimate how exactly the accuracies of a task are known from all its trainings."""
    trained = [group for group in trained if group.mean is not None]
    groups = [group.values for group in trained if len(group.values) > 1]
    degrees = sum(len(group) - 1 for group in groups)
    chance = CHANCE.get(task, 0.0)
    alike = chance + _ALIKE * (max((group.mean or 0.0 for group in trained), default=0.0) - chance)
    residual, residual_degrees = _residual([group for group in trained if (group.mean or 0.0) >= alike])
    return AccuracyScale(
        task=task,
        metric=metric,
        num_judged=num_judged,
        deviation=math.sqrt(sum(_squares(group) for group in groups) / degrees) if degrees else None,
        degrees=degrees,
        alike=alike,
        residual=residual,
        residual_degrees=residual_degrees,
    )


def _residual(trained: Sequence[SeedValues]) -> tuple[float | None, int]:
    """The deviation that is left when means of trainings and of seeds are taken out, with its degrees of freedom."""
    if not trained:
        return None, 0
    seeds = [seed for seed in trained[0].by_seed if all(seed in group.by_seed for group in trained)]
    degrees = (len(trained) - 1) * (len(seeds) - 1)
    if degrees < 1:
        return None, 0
    rows = [[group.by_seed[seed].value for seed in seeds] for group in trained]
    of_seeds = [statistics.fmean(column) for column in zip(*rows, strict=True)]
    mean = statistics.fmean(of_seeds)
    left = [value - statistics.fmean(row) - of_seeds[i] + mean for row in rows for i, value in enumerate(row)]
    return math.sqrt(sum(value**2 for value in left) / degrees), degrees


def _quantile(level: float, degrees: int) -> float:
    """A quantile of Student's t distribution; beyond its table by the first terms of its expansion."""
    table, normal = _QUANTILES[level]
    if degrees <= len(table):
        return table[degrees - 1]
    first, second = (normal**3 + normal) / 4, (5 * normal**5 + 16 * normal**3 + 3 * normal) / 96
    return normal + first / degrees + second / degrees**2


def _squares(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return sum((value - mean) ** 2 for value in values)
