"""Metrics: accuracy, and Matthews correlation for CoLA."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stagewright.errors import UsageError


def accuracy(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Return the share of predictions that equal their label."""
    predicted, true = _checked(predictions, labels)
    return float(np.mean(predicted == true))


def matthews(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Return the Matthews correlation for any number of classes: 1 is perfect, 0 is chance, -1 is all wrong.

    With c correct of s samples, and class k predicted p_k times and true t_k times:

        (c s - Σ p_k t_k) / sqrt((s² - Σ p_k²) (s² - Σ t_k²)),  0 if the root is 0
    """
    predicted, true = _checked(predictions, labels)
    classes = np.unique(np.concatenate([predicted, true]))
    num_predicted = [int(np.sum(predicted == label)) for label in classes]
    num_true = [int(np.sum(true == label)) for label in classes]
    num_samples, num_correct = len(true), int(np.sum(predicted == true))
    numerator = num_correct * num_samples - sum(p * t for p, t in zip(num_predicted, num_true, strict=True))
    squared = (num_samples**2 - sum(p * p for p in num_predicted)) * (num_samples**2 - sum(t * t for t in num_true))
    return numerator / math.sqrt(squared) if squared else 0.0


METRICS = {"accuracy": accuracy, "matthews": matthews}


def _checked(predictions: ArrayLike, labels: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
    predicted, true = np.asarray(predictions), np.asarray(labels)
    if predicted.shape != true.shape or predicted.ndim != 1 or len(true) == 0:
        raise UsageError(
            "a metric compares two lists of classes of the same length, at least 1; "
            f"predictions have shape {predicted.shape}, labels {true.shape}"
        )
    return predicted, true
