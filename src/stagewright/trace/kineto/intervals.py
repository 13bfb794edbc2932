"""Sets of time as sorted lists of disjoint intervals. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

Interval: TypeAlias = tuple[float, float]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals in any order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def subtract(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the time that is in the first set and not in the second."""
    rest: list[Interval] = []
    position = 0
    for start, end in first:
        while position < len(second) and second[position][1] <= start:
            position += 1
        index = position
        while index < len(second) and second[index][0] < end:
            if second[index][0] > start:
                rest.append((start, second[index][0]))
            start = max(start, second[index][1])
            index += 1
        if start < end:
            rest.append((start, end))
    return rest


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the time that is in both sets."""
    return subtract(first, subtract(first, second))


def clip(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """Return the part of the set between two moments."""
    return [(max(a, start), min(b, end)) for a, b in intervals if b > start and a < end]


def total(intervals: Iterable[Interval]) -> float:
    """Return the length of the set."""
    return sum(end - start for start, end in intervals)
