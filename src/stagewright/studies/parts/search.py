"""Find the largest size that runs under a memory limit, by running: one size ran, and the next one did not. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MOST_ATTEMPTS = 8
"""Runs of a search; a forecast is rarely off by more than a few sizes."""


def next_size(ran: Mapping[int, bool], least: int) -> int | None:
    """Return the next size to test, given which sizes ran; None: the largest is known.

    The forecast is rarely off by more than one, so one more (or fewer) comes first; then steps of 2, 4, … until one
    size ran and another did not; then bisection.

        7 ran ─► 8 did not: done          7 ran ─► 8 ran ─► 10 ran ─► 14 did not ─► 12 …
    """
    fitting, failing = [size for size, fits in ran.items() if fits], [size for size, fits in ran.items() if not fits]
    if fitting and failing:
        middle = (max(fitting) + min(failing)) // 2
        return None if middle in ran else middle
    step: int = 1 << (len(ran) - 1)
    if fitting:
        return max(fitting) + step
    return max(least, min(failing) - step) if min(failing) > least else None


def find_largest(
    start: int, least: int, run: Callable[[int], dict[str, Any]]
) -> tuple[int, bool, list[dict[str, Any]]]:
    """Find the largest size that runs.

    Args:
        start: The size to run first.
        least: The smallest possible size.
        run: Runs a size; its result says under ``ran`` whether the size fits.

    Returns:
        The largest size that ran (0: none), whether the next one was run and did not fit, and the results of all runs.
    """
    ran: dict[int, bool] = {}
    attempts: list[dict[str, Any]] = []
    size: int | None = start
    while len(attempts) < MOST_ATTEMPTS and size is not None:
        attempts.append(run(size))
        ran[size] = attempts[-1]["ran"]
        size = next_size(ran, least)
    largest = max((size for size, fits in ran.items() if fits), default=0)
    return largest, ran.get(largest + 1 if largest else least) is False, attempts


def largest_below(amount: Callable[[int], int], limit: int, most: int = 1 << 20) -> int:
    """Return the largest size whose amount, which grows with the size, is within the limit; 0 if none is."""
    high = 1
    while high < most and amount(high) <= limit:
        high *= 2
    low, high = high // 2, min(high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if amount(middle) <= limit else (low, middle)
    return low
