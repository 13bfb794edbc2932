from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from stagewright.machine.link_fit import LinkPoint, fit_collective, fit_link

SIZES = (8, 4096, 2**16, 2**18, 2**20, 2**22, 2**24)


def points(times_s: dict[int, float]) -> list[LinkPoint]:
    return [LinkPoint(num_bytes=n, median_s=t, spread_s=0.0, num_messages=10) for n, t in times_s.items()]


@given(st.floats(1e-6, 1e-3), st.floats(1e7, 1e11))
def test_a_line_is_found_again(latency_s: float, bandwidth: float) -> None:
    measured = fit_link(points({n: latency_s + n / bandwidth for n in SIZES}))
    assert measured.link.latency_s == pytest.approx(latency_s, rel=1e-3)
    assert measured.link.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-2)
    assert measured.error < 1e-2


def test_one_slow_size_does_not_decide() -> None:
    times_s = {n: 20e-6 + n / 1e9 for n in SIZES}
    times_s[2**24] *= 3
    measured = fit_link(points(times_s))
    assert measured.link.bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.25)
    assert measured.error == pytest.approx(2 / 3, abs=0.1)


def test_noise_larger_than_the_bytes_still_gives_a_link() -> None:
    measured = fit_link(points({8: 5e-3, 2**20: 1e-3}))
    assert measured.link.bandwidth_bytes_per_s == pytest.approx(2**20 / 1e-3, rel=1e-3)
    assert 0 <= measured.link.latency_s <= 5e-3


def test_order_of_points_does_not_matter() -> None:
    forward = points({n: 20e-6 + n / 1e9 for n in SIZES})
    assert fit_link(forward[::-1]) == fit_link(forward)


def test_a_collective_of_two() -> None:
    """An all-reduce of n bytes takes 2 · 50 µs + n / 1 GB/s; half of each was measured."""
    found = fit_collective(points({n: (2 * 50e-6 + n / 1e9) / 2 for n in SIZES}))
    assert found.latency_s == pytest.approx(50e-6, rel=1e-3)
    assert found.bandwidth_bytes_per_s == pytest.approx(1e9, rel=1e-2)
