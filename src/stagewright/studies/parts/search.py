"""Find the largest size that runs under a memory limit, by running: one size ran, and the next one did not. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

MOST_ATTEMPTS = 8
"""Runs of a search; a forecast is rarely off by more than a few sizes."""


def next_size(ran: Mapping[int, bool], least: int) -> int | None:
    """Return the next size to test, given which sizes ran; None: the largest is known.

    The forecast is rarely off by more than one, so one more (or fewer) comes first; then steps of 2, 4, … until one
    size ran and another did not; then bisection.

        7 ran ─► 8 did not: done          7 ran ─► 8 ran ─► 10 ran ─► 14 did not ─► 12 …
    """
    good, bad = [size for size, fits in ran.items() if fits], [size for size, fits in ran.items() if not fits]
    if good and bad:
        middle = (max(good) + min(bad)) // 2
        return None if middle in ran else middle
    step: int = 1 << (len(ran) - 1)
    if good:
        return max(good) + step
    return max(least, min(bad) - step) if min(bad) > least else None


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
