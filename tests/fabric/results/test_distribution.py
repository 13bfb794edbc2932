from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from stagewright.errors import UsageError
from stagewright.fabric.results.distribution import PERCENTILES, Threshold, distribution_of, min_samples


def test_what_is_needed_is_as_the_page_says() -> None:
    assert {name: min_samples(name) for name in PERCENTILES} == {
        "p50": 4,
        "p90": 20,
        "p95": 40,
        "p99": 200,
        "p99.9": 2000,
    }


@given(count=st.integers(0, 2500))
def test_a_percentile_is_given_or_refused(count: int) -> None:
    found = distribution_of(np.arange(count, dtype=np.float64))
    for name, share in PERCENTILES.items():
        value = found.percentiles[name]
        if count < min_samples(name):
            assert value is None
        else:
            assert value is not None
            below = np.sum(np.arange(count) <= value)
            assert below >= share * count, "at least that share is no longer"
            assert np.sum(np.arange(count) > value) >= 2, "two samples lie beyond"


def test_known_values() -> None:
    found = distribution_of(np.array([1.0, 3.0, 2.0, 6.0]))
    assert found.percentiles["p50"] == 2.0
    assert (found.min_s, found.mean_s, found.max_s) == (1.0, 3.0, 6.0)
    assert found.jitter_s == pytest.approx((2 + 1 + 4) / 3)
    assert found.to_dict()["p99_s"] is None
    assert "p999_s" in found.to_dict()


def test_thresholds() -> None:
    assert Threshold.parse("p99=50ms") == Threshold(name="p99", limit_s=0.05)
    assert Threshold.parse("max=2s").name == "max"
    for wrong in ("p98=1ms", "p99", "p99=fast", "=1ms"):
        with pytest.raises(UsageError):
            Threshold.parse(wrong)
