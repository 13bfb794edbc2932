from __future__ import annotations

import warnings

import pytest
from hypothesis import given, strategies as some
from sklearn.metrics import accuracy_score, matthews_corrcoef

from stagewright.errors import UsageError
from stagewright.zoo.tasks.metric import accuracy, matthews

pairs = some.lists(some.tuples(some.integers(0, 3), some.integers(0, 3)), min_size=1, max_size=40)


@given(pairs)
def test_equal_to_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    predicted, true = [one for one, _ in pairs], [one for _, one in pairs]
    assert accuracy(predicted, true) == pytest.approx(accuracy_score(true, predicted))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a single label
        expected = matthews_corrcoef(true, predicted)
    assert matthews(predicted, true) == pytest.approx(expected, abs=1e-12)


def test_known_values() -> None:
    assert matthews([1, 1, 0, 0], [1, 1, 0, 0]) == 1
    assert matthews([0, 0, 1, 1], [1, 1, 0, 0]) == -1
    assert matthews([1, 1, 1, 1], [1, 1, 0, 0]) == 0
    assert accuracy([1, 2, 3, 4], [1, 2, 3, 0]) == 0.75


def test_lists_that_do_not_match() -> None:
    with pytest.raises(UsageError, match=r"shape \(2,\), labels \(3,\)"):
        accuracy([1, 2], [1, 2, 3])
    with pytest.raises(UsageError, match="at least 1"):
        matthews([], [])
