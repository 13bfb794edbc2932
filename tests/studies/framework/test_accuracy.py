"""What accuracies over seeds can tell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from stagewright.runs.predictions import Predictions
from stagewright.studies.framework.accuracy import accuracy_scale
from stagewright.studies.framework.rounds import SeedValue, SeedValues
from stagewright.studies.framework.sample_differences import sample_half_width
from stagewright.zoo.tasks.metric import matthews


def trained(values: Sequence[float], predictions: Sequence[Predictions] | None = None) -> SeedValues:
    return SeedValues(
        trained=tuple(
            SeedValue(seed=seed, value=value, predictions=predictions[seed] if predictions is not None else None)
            for seed, value in enumerate(values)
        )
    )


def reached(labels: np.ndarray, predicted: Sequence[np.ndarray]) -> SeedValues:
    """Trainings that predicted this with seeds 0, 1, …"""
    found = [Predictions(labels=labels, predicted=one) for one in predicted]
    return trained([100 * float(np.mean(one.labels == one.predicted)) for one in found], found)


def some_predictions(share: float, count: int = 360, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels of ten classes, and predictions of which this share is right."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(10, size=count)
    return labels, np.where(generator.random(count) < share, labels, (labels + 1) % 10)


def test_trainings_that_predict_alike_are_told_apart_by_few_samples() -> None:
    """Seeds differ by 11 points, which a codec that changes no prediction does not explain."""
    labels, weak = some_predictions(0.75)
    strong = some_predictions(0.86)[1]
    plain, alike = reached(labels, [weak, strong]), reached(labels, [weak.copy(), strong.copy()])
    scale = accuracy_scale("digits", "accuracy", [plain, alike], 360)
    assert scale.half_width(plain) > 10
    difference = scale.difference(alike, plain)
    assert difference.points == 0
    assert difference.half_width == pytest.approx(100 * 3 / 360), "three samples may differ"
    assert scale.compare(alike, plain, 1.0) == "keeps"
    assert scale.compare(alike, plain, 0.5) == "unclear"


def test_samples_that_another_evaluation_saw_are_not_compared_one_by_one() -> None:
    labels, predicted = some_predictions(0.8)
    first = Predictions(labels=labels, predicted=predicted)
    second = Predictions(labels=np.roll(labels, 1), predicted=predicted)
    assert sample_half_width("accuracy", [(first, first)]) is not None
    for pairs in ([(first, second)], [(first, None)], [(first, first), (second, second)], []):
        assert sample_half_width("accuracy", pairs) is None


def test_a_metric_that_is_no_mean_is_judged_by_leaving_each_sample_out() -> None:
    generator = np.random.default_rng(3)
    labels = (generator.random(200) < 0.7).astype(np.int64)
    first, second = (np.where(generator.random(200) < share, labels, 1 - labels) for share in (0.8, 0.7))
    pseudo = [
        200 * (matthews(first, labels) - matthews(second, labels))
        - 199 * (matthews(first[kept], labels[kept]) - matthews(second[kept], labels[kept]))
        for kept in (np.arange(200) != index for index in range(200))
    ]
    pair = (Predictions(labels=labels, predicted=first), Predictions(labels=labels, predicted=second))
    expected = 100 * 1.96 * np.std(pseudo, ddof=1) / np.sqrt(200)
    assert sample_half_width("matthews", [pair]) == pytest.approx(expected)


@pytest.mark.parametrize("noises", [(1.0, 1.0, 1.0, 1.0), (0.05, 0.5, 1.0, 3.0)])
@pytest.mark.parametrize("num_seeds", [2, 3, 5])
def test_intervals_of_differences_contain_the_truth(noises: tuple[float, ...], num_seeds: int) -> None:
    """In 95 of 100 studies, also where codecs vary by different amounts."""
    generator = np.random.default_rng(7)
    hits = np.zeros(len(noises))
    for _ in range(400):
        seeds = generator.normal(80, 5, num_seeds)
        plain = trained(seeds + generator.normal(0, 0.05, num_seeds))
        others = [trained(seeds - 1 + generator.normal(0, noise, num_seeds)) for noise in noises]
        scale = accuracy_scale("digits", "accuracy", [plain, *others], None)
        found = [scale.difference(one, plain) for one in others]
        hits += [abs(one.points + 1) <= one.half_width for one in found]
    least = 0.93 if len(set(noises)) == 1 else 0.84  # two seeds hardly tell that a codec is noisier than the others
    assert min(hits) / 400 >= least


def test_one_seed_keeps_nothing_and_one_that_failed_is_left_out() -> None:
    alone = accuracy_scale("digits", "accuracy", [trained([80.0]), trained([80.0])], 10**6)
    assert alone.compare(trained([80.0]), trained([80.0]), 1.0) == "unclear"
    reference = trained([70.0, 80.0, 90.0])
    partly = SeedValues(trained=(SeedValue(seed=2, value=89.0), SeedValue(seed=0, value=69.0)))
    scale = accuracy_scale("digits", "accuracy", [reference, partly], 10**6)
    assert scale.difference(partly, reference).points == pytest.approx(-1.0), "not 79 − 80 of other seeds"
