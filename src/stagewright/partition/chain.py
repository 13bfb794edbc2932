"""The exact best way to cut a chain of units into consecutive stages: integers in, cuts out.

    unit      0   1   2   3   4   5   6          stage i takes the units start … end-1
    boundary 0   1   2   3   4   5   6   7       compute_i[end] - compute_i[start], then link_i[end]
              └─ stage 0 ─┘└─ 1 ─┘└── 2 ──┘

Minimised, in this order: the pace, which is the slowest stage (compute and link); the fill, which is the sum over
stages of both; the bytes that cross; the sum of squared stage times (evenness). Everything is an integer, so ties are
real ties.

How: under a bound on the pace, one dynamic programme over boundaries gives the least pace, another the least fill; only
ranges that the bound allows are looked at, about (number of units)² in all, whatever the number of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Allowed", "Chain", "best_cuts"]

Integers: TypeAlias = npt.NDArray[np.int64]
# allowed(stage, ends, width)[row, column]: may `stage` take the units ends[row] - width + column … ends[row] - 1?
# The ends are consecutive; columns that start before the first unit may hold anything.
Allowed: TypeAlias = Callable[[int, Integers, int], npt.NDArray[np.bool_]]

Number = TypeVar("Number", np.int64, np.float64)

_NEVER = np.int64(2**62)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """What every possible stage of a chain costs. Sums must stay below 2**61."""

    compute: Integers
    """compute[stage, boundary]: time of all units before the boundary on that stage's device."""
    link: Integers
    """link[stage, boundary]: time of the link after the stage if it ends there."""
    sends: Integers
    """sends[boundary]: bytes that cross there."""
    overlap: bool = False
    """Whether a link works while its stage computes: the pace is then the larger of both, not their sum."""
    allowed: Allowed | None = None
    """Which ranges a stage may take at all (its memory); None allows every range."""

    @property
    def num_stages(self) -> int:
        return int(self.compute.shape[0])

    @property
    def num_units(self) -> int:
        return int(self.compute.shape[1]) - 1

    def pace(self, stage: int, start: int, end: int) -> int:
        """How long the stage is busy with one micro-batch."""
        compute = int(self.compute[stage, end] - self.compute[stage, start])
        link = int(self.link[stage, end])
        return max(compute, link) if self.overlap else compute + link


def best_cuts(chain: Chain) -> tuple[int, ...] | None:
    """The boundary after each stage (the last is the number of units), or None where no split is allowed."""
    quickest = _least_pace(chain)
    return None if quickest is None else _least_fill(chain, quickest)


def _ceiling(chain: Chain) -> int:
    """A pace that no stage can exceed."""
    return int(chain.compute[:, -1].max() + chain.link.max())


def _least_pace(chain: Chain) -> int | None:
    """The least possible pace."""
    ceiling = _ceiling(chain)
    # No split can beat all devices busy all the time, nor its largest unit; the truth is mostly a little above.
    busy = int(1 / np.sum(1 / np.maximum(chain.compute[:, -1], 1)))
    largest = int(np.diff(chain.compute, axis=1).min(axis=0).max())
    floor = max(busy, largest)
    # Low bounds are cheap to try, the ceiling is not.
    for share in (0.1, 0.4, 1.5):
        bound = floor + int(share * floor) + 1
        if bound < ceiling and (pace := _least_pace_within(chain, bound)) is not None:
            return pace
    return _least_pace_within(chain, ceiling)


def _reach(chain: Chain, bound: int) -> list[tuple[int, int]] | None:
    """Between which boundaries each stage can end when no stage is slower than the bound; None: it can't be done."""
    num_stages, num_units = chain.num_stages, chain.num_units
    busy = chain.compute if chain.overlap else chain.compute + chain.link
    # least_busy[stage, boundary]: of the stages that end there or later; rises with the boundary.
    least_busy = np.minimum.accumulate(busy[:, ::-1], axis=1)[:, ::-1]
    highest, lowest = [0] * num_stages, [num_units] * num_stages
    at = 0
    for stage in range(num_stages):
        latest = int(np.searchsorted(least_busy[stage], chain.compute[stage, at] + bound, side="right")) - 1
        at = highest[stage] = min(latest, num_units - (num_stages - 1 - stage))
        if at <= stage:
            return None
    at = num_units
    for stage in range(num_stages - 1, 0, -1):
        earliest = int(np.searchsorted(chain.compute[stage], least_busy[stage, at] - bound, side="left"))
        at = lowest[stage - 1] = max(earliest, stage)
    if any(low > high for low, high in zip(lowest, highest, strict=True)):
        return None
    return list(zip(lowest, highest, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranges:
    stage: int
    low: int  # first boundary where the stage can end
    ends: Integers  # low, low + 1, …
    width: int  # most units that the stage can take
    usable: npt.NDArray[np.bool_]  # [row, column]: may it take ends[row] - width + column … ends[row] - 1?

    def before(self, values: npt.NDArray[Number], padding: Number) -> npt.NDArray[Number]:
        """Row by row, the values at the `width` boundaries before each end."""
        padded = np.concatenate([np.full(self.width, padding), values])
        return np.lib.stride_tricks.sliding_window_view(padded, self.width)[self.low : self.low + len(self.ends)]


def _ranges(chain: Chain, bound: int) -> Iterator[_Ranges]:
    """Stage by stage, the ranges whose pace is within the bound; stops early where a stage has none."""
    previous_low = 0
    for stage, (low, high) in enumerate(_reach(chain, bound) or ()):
        compute, link = chain.compute[stage], chain.link[stage]
        ends = np.arange(low, high + 1)
        room = np.where(link[ends] <= bound, bound, -1) if chain.overlap else bound - link[ends]
        first = np.maximum(np.searchsorted(compute, compute[ends] - room, side="left"), previous_low)
        width = int((ends - first).max())
        if width <= 0:
            return
        usable = np.arange(width) >= (width - (ends - first))[:, None]
        if chain.allowed is not None:
            usable &= chain.allowed(stage, ends, width)
        yield _Ranges(stage=stage, low=low, ends=ends, width=width, usable=usable)
        previous_low = low


def _least_pace_within(chain: Chain, bound: int) -> int | None:
    """The least possible pace if it is within the bound."""
    pace = np.full(chain.num_units + 1, _NEVER)
    pace[0] = 0
    num_done = 0
    for ranges in _ranges(chain, bound):
        values = np.maximum(ranges.before(pace, _NEVER), _paces(chain, ranges, slice(None)))
        least = np.where(ranges.usable, values, _NEVER).min(axis=1)
        pace = np.full(chain.num_units + 1, _NEVER)
        pace[ranges.ends] = least
        num_done += 1
    return int(pace[-1]) if num_done == chain.num_stages and pace[-1] < _NEVER else None


def _least_fill(chain: Chain, bound: int) -> tuple[int, ...] | None:
    """The cuts of least fill with no stage's pace above the bound; among equals the fewest bytes, then the evenest."""
    fill = np.full(chain.num_units + 1, _NEVER)
    fill[0] = 0
    sent = np.zeros(chain.num_units + 1, dtype=np.int64)
    squares = np.zeros(chain.num_units + 1)
    origin: list[tuple[int, Integers]] = []
    for ranges in _ranges(chain, bound):
        ends, compute = ranges.ends, chain.compute[ranges.stage]
        waiting = np.where(fill < _NEVER, fill - compute, _NEVER)
        values = np.where(ranges.usable, ranges.before(waiting, _NEVER), _NEVER)
        choice = values.argmin(axis=1)
        least = values[np.arange(len(ends)), choice]
        ties = values == least[:, None]
        tied = np.flatnonzero((ties.sum(axis=1) > 1) & (least < _NEVER))
        if len(tied):
            bytes_before = np.where(ties[tied], ranges.before(sent, np.int64(0))[tied], _NEVER)
            fewest = bytes_before == bytes_before.min(axis=1)[:, None]
            squares_before = ranges.before(squares, np.float64(0))[tied]
            even = squares_before + _paces(chain, ranges, tied).astype(np.float64) ** 2
            choice[tied] = np.where(fewest, even, np.inf).argmin(axis=1)
        starts = np.maximum(ends - ranges.width + choice, 0)
        spent, link = compute[ends] - compute[starts], chain.link[ranges.stage, ends]
        paces = (np.maximum(spent, link) if chain.overlap else spent + link).astype(np.float64)
        sent = _at(ends, sent[starts] + chain.sends[ends], chain.num_units)
        squares = _at(ends, squares[starts] + paces**2, chain.num_units)
        fill = np.full(chain.num_units + 1, _NEVER)
        fill[ends] = np.where(least < _NEVER, least + compute[ends] + link, _NEVER)
        origin.append((ranges.low, ends - ranges.width + choice))
    if len(origin) < chain.num_stages or fill[-1] >= _NEVER:
        return None
    return _walk_back(origin, chain.num_units)


def _paces(chain: Chain, ranges: _Ranges, rows: Integers | slice) -> Integers:
    """The pace of every range that ends in one of the rows."""
    compute, ends = chain.compute[ranges.stage], ranges.ends[rows]
    spent: Integers = compute[ends][:, None] - ranges.before(compute, np.int64(0))[rows]
    links: Integers = chain.link[ranges.stage, ends][:, None]
    return np.maximum(spent, links) if chain.overlap else spent + links


def _at(ends: Integers, values: npt.NDArray[Number], num_units: int) -> npt.NDArray[Number]:
    """The values at their boundaries, 0 elsewhere."""
    placed = np.zeros(num_units + 1, dtype=values.dtype)
    placed[ends] = values
    return placed


def _walk_back(origin: Sequence[tuple[int, Integers]], num_units: int) -> tuple[int, ...]:
    """The boundary after each stage, from where each stage's best choice started."""
    ends = [num_units]
    for low, starts in reversed(origin[1:]):
        ends.append(int(starts[ends[-1] - low]))
    return tuple(reversed(ends))
