"""How exactly two trainings are told apart by the samples on which they were evaluated. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stagewright.runs.predictions import Predictions
from stagewright.zoo.tasks.metric import METRICS

_NORMAL = 1.96
_UNSEEN = 3.0
"""Samples that may differ although none did, with 95 % confidence, whatever their number (the rule of three)."""


def sample_half_width(metric: str, pairs: Sequence[tuple[Predictions | None, Predictions | None]]) -> float | None:
    """Half of the 95 % interval of a mean difference × 100 that the choice of samples causes.

    Each pair has the predictions of two trainings with one seed. None where they are not known for the same samples.
    """
    columns: list[NDArray[np.float64]] = []
    largest = 0.0
    labels: NDArray[np.int64] | None = None
    for first, second in pairs:
        if first is None or second is None or len(second.labels) < 2:
            return None
        labels = second.labels if labels is None else labels
        if not (np.array_equal(labels, first.labels) and np.array_equal(labels, second.labels)):
            return None
        of_first, of_second = (_influences(metric, one) for one in (first, second))
        columns.append(of_first - of_second)
        largest = max(largest, float(np.ptp(of_second)))
    if not columns:
        return None
    of_samples = np.mean(columns, axis=0)
    count = len(of_samples)
    return 100 * max(_NORMAL * float(np.std(of_samples, ddof=1)) / math.sqrt(count), _UNSEEN * (largest or 1) / count)


def _influences(metric: str, predictions: Predictions) -> NDArray[np.float64]:
    """What each sample contributes to a metric: the jackknife's pseudo-values. Samples of one kind contribute alike."""
    labels, predicted = predictions.labels, predictions.predicted
    if metric == "accuracy":
        return np.equal(labels, predicted).astype(np.float64)
    count, compute = len(labels), METRICS[metric]
    _, first, kinds = np.unique(np.stack([labels, predicted]), axis=1, return_index=True, return_inverse=True)
    whole = count * compute(predicted, labels)
    left_out = [compute(np.delete(predicted, index), np.delete(labels, index)) for index in first]
    of_kinds = [whole - (count - 1) * value for value in left_out]
    return np.array([of_kinds[kind] for kind in kinds.reshape(-1)], dtype=np.float64)
