"""Sums over contiguous ranges of units in which what several units hold counts once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from stagewright.profiler.profile import Amount


class RangeSums:
    """Amounts of contiguous ranges of units, by prefix sums."""

    def __init__(self, amounts: Sequence[Amount]) -> None:
        self._prefix = [0, *itertools.accumulate(amount.total for amount in amounts)]
        self._shares = [(unit, earlier, size) for unit, amount in enumerate(amounts) for earlier, size in amount.shares]

    def of(self, first: int, last: int) -> int:
        """Return the amount of the units first … last, with shared amounts counted once."""
        repeated = sum(size for unit, earlier, size in self._shares if earlier >= first and unit <= last)
        return self._prefix[last + 1] - self._prefix[first] - repeated
