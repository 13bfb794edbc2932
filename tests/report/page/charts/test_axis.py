from __future__ import annotations

import pytest
from hypothesis import example, given, strategies as st

from stagewright.report.page.charts.axis import format_tick, log_ticks, ticks


def test_ticks_are_round() -> None:
    assert ticks(0, 100) == [0, 25, 50, 75, 100]
    assert ticks(0, 0.043) == pytest.approx([0, 0.02, 0.04, 0.06])
    assert ticks(0, 3 * 2**20, "bytes") == [0, 2**20, 2**21, 3 * 2**20]
    assert ticks(0, 0) == [0, 0.25, 0.5, 0.75, 1.0]


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12), st.sampled_from(["number", "bytes", "seconds"]))
@example(1423118.0, 6.103515625e-05, "number")
@example(180143985095.65625, 6.103515625e-05, "number")
def test_ticks_hold_the_range(low: float, length: float, quantity: str) -> None:
    high = low + length
    found = ticks(low, high, quantity)  # type: ignore[arg-type]
    slack = 1e-6 * (found[-1] - found[0])
    assert found[0] <= low + slack
    assert found[-1] >= high - slack
    assert 2 <= len(found) <= 12


@given(st.floats(1e-9, 1e9), st.floats(1.0, 1e12))
def test_logarithmic_ticks_hold_the_range(low: float, factor: float) -> None:
    found = log_ticks(low, low * factor)
    assert found[0] <= low * (1 + 1e-6)
    assert found[-1] >= low * factor * (1 - 1e-6)
    assert found == sorted(found)
    assert len(found) >= 2


def test_labels() -> None:
    assert format_tick(0.02, "seconds") == "20 ms"
    assert format_tick(2.5, "times") == "2.5 ×"
    assert format_tick(0.975, "share") == "97.5 %"
    assert format_tick(2**20, "bytes") == "1 MiB"
    assert format_tick(100 * 2**20, "bytes") == "100 MiB"
    assert format_tick(0.25, "number") == "0.25"
    assert format_tick(20_000, "number") == "20 k"
