"""The optimal cuts of a chain of units into consecutive stages, as an exact search over integers.

    unit      0   1   2   3   4   5   6          stage i takes the units start … end-1
    boundary 0   1   2   3   4   5   6   7       compute_i[end] - compute_i[start], then link_i[end]
              └─ stage 0 ─┘└─ 1 ─┘└── 2 ──┘

It minimizes, in this order: the bottleneck, which is the slowest stage (compute and link); the latency, which is the
sum of both over all stages; the bytes that cross; the sum of squared stage times (imbalance). Everything is an integer,
so ties are exact.

Under a bound on the bottleneck, one dynamic program over boundaries gives the smallest bottleneck, another the smallest
latency. Only ranges within the bound are visited, about (number of units)² in total for any number of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Integers: TypeAlias = npt.NDArray[np.int64]
# allowed(stage, ends, width)[row, column]: may `stage` hold the units ends[row] - width + column … ends[row] - 1?
# The ends are consecutive; columns that start before the first unit may have any value.
Allowed: TypeAlias = Callable[[int, Integers, int], npt.NDArray[np.bool_]]

Number = TypeVar("Number", np.int64, np.float64)

_INFINITE = np.int64(2**62)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The costs of every possible stage of a chain. Sums must stay below 2**61."""

    compute: Integers
    """compute[stage, boundary]: time of all units before the boundary on the stage's device."""
    link: Integers
    """link[stage, boundary]: time of the link behind the stage if it ends there."""
    sends: Integers
    """sends[boundary]: bytes that cross there."""
    overlap: bool = False
    """Whether a link overlaps with compute: a stage then takes the larger of both, not their sum."""
    allowed: Allowed | None = None
    """Which ranges fit in a stage's memory; None allows every range."""

    @property
    def num_stages(self) -> int:
        return int(self.compute.shape[0])

    @property
    def num_units(self) -> int:
        return int(self.compute.shape[1]) - 1


def best_cuts(chain: Chain) -> tuple[int, ...] | None:
    """Return the boundary after each stage (the last is the number of units), or None if no split is allowed."""
    bottleneck = _min_bottleneck(chain)
    return None if bottleneck is None else _min_latency(chain, bottleneck)


def _ceiling(chain: Chain) -> int:
    """Return a time that no stage can exceed."""
    return int(chain.compute[:, -1].max() + chain.link.max())


def _min_bottleneck(chain: Chain) -> int | None:
    """Return the smallest possible bottleneck."""
    ceiling = _ceiling(chain)
    # No split is faster than perfectly balanced devices, nor than its largest unit; the optimum is usually close.
    balanced = int(1 / np.sum(1 / np.maximum(chain.compute[:, -1], 1)))
    largest = int(np.diff(chain.compute, axis=1).min(axis=0).max())
    floor = max(balanced, largest)
    # Low bounds are cheap to search, the ceiling is not.
    for share in (0.1, 0.4, 1.5):
        bound = floor + int(share * floor) + 1
        if bound < ceiling and (bottleneck := _min_bottleneck_within(chain, bound)) is not None:
            return bottleneck
    return _min_bottleneck_within(chain, ceiling)


def _reach(chain: Chain, bound: int) -> list[tuple[int, int]] | None:
    """Return the first and last boundary where each stage can end within the bound; None if there is no split."""
    num_stages, num_units = chain.num_stages, chain.num_units
    busy = chain.compute if chain.overlap else chain.compute + chain.link
    # least_busy[stage, boundary]: minimum over stages that end there or later; increases with the boundary.
    least_busy = np.minimum.accumulate(busy[:, ::-1], axis=1)[:, ::-1]
    highest, lowest = [0] * num_stages, [num_units] * num_stages
    boundary = 0
    for stage in range(num_stages):
        latest = int(np.searchsorted(least_busy[stage], chain.compute[stage, boundary] + bound, side="right")) - 1
        boundary = highest[stage] = min(latest, num_units - (num_stages - 1 - stage))
        if boundary <= stage:
            return None
    boundary = num_units
    for stage in range(num_stages - 1, 0, -1):
        earliest = int(np.searchsorted(chain.compute[stage], least_busy[stage, boundary] - bound, side="left"))
        boundary = lowest[stage - 1] = max(earliest, stage)
    if any(low > high for low, high in zip(lowest, highest, strict=True)):
        return None
    return list(zip(lowest, highest, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranges:
    stage: int
    low: int
    """The first boundary where the stage can end."""
    ends: Integers
    """low, low + 1, …"""
    width: int
    """The largest number of units in the stage."""
    usable: npt.NDArray[np.bool_]
    """[row, column]: whether it may hold ends[row] - width + column … ends[row] - 1."""

    def before(self, values: npt.NDArray[Number], padding: Number) -> npt.NDArray[Number]:
        """Return, for each end, the values at the `width` boundaries before it."""
        padded = np.concatenate([np.full(self.width, padding), values])
        return np.lib.stride_tricks.sliding_window_view(padded, self.width)[self.low : self.low + len(self.ends)]


def _ranges(chain: Chain, bound: int) -> Iterator[_Ranges]:
    """Yield for each stage the ranges within the bound; stop early if a stage has none."""
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


def _min_bottleneck_within(chain: Chain, bound: int) -> int | None:
    """Return the smallest possible bottleneck if it is within the bound."""
    bottleneck = np.full(chain.num_units + 1, _INFINITE)
    bottleneck[0] = 0
    num_done = 0
    for ranges in _ranges(chain, bound):
        values = np.maximum(ranges.before(bottleneck, _INFINITE), _stage_times(chain, ranges, slice(None)))
        smallest = np.where(ranges.usable, values, _INFINITE).min(axis=1)
        bottleneck = np.full(chain.num_units + 1, _INFINITE)
        bottleneck[ranges.ends] = smallest
        num_done += 1
    return int(bottleneck[-1]) if num_done == chain.num_stages and bottleneck[-1] < _INFINITE else None


def _min_latency(chain: Chain, bound: int) -> tuple[int, ...] | None:
    """Return the cuts with the smallest latency within the bound; ties go to fewer bytes, then to better balance."""
    latency = np.full(chain.num_units + 1, _INFINITE)
    latency[0] = 0
    sent = np.zeros(chain.num_units + 1, dtype=np.int64)
    squares = np.zeros(chain.num_units + 1)
    origin: list[tuple[int, Integers]] = []
    for ranges in _ranges(chain, bound):
        ends, compute = ranges.ends, chain.compute[ranges.stage]
        overhead = np.where(latency < _INFINITE, latency - compute, _INFINITE)
        values = np.where(ranges.usable, ranges.before(overhead, _INFINITE), _INFINITE)
        choice = values.argmin(axis=1)
        smallest = values[np.arange(len(ends)), choice]
        ties = values == smallest[:, None]
        tied = np.flatnonzero((ties.sum(axis=1) > 1) & (smallest < _INFINITE))
        if len(tied):
            bytes_before = np.where(ties[tied], ranges.before(sent, np.int64(0))[tied], _INFINITE)
            fewest = bytes_before == bytes_before.min(axis=1)[:, None]
            squares_before = ranges.before(squares, np.float64(0))[tied]
            imbalance = squares_before + _stage_times(chain, ranges, tied).astype(np.float64) ** 2
            choice[tied] = np.where(fewest, imbalance, np.inf).argmin(axis=1)
        starts = np.maximum(ends - ranges.width + choice, 0)
        spent, link = compute[ends] - compute[starts], chain.link[ranges.stage, ends]
        times = (np.maximum(spent, link) if chain.overlap else spent + link).astype(np.float64)
        sent = _scatter(ends, sent[starts] + chain.sends[ends], chain.num_units)
        squares = _scatter(ends, squares[starts] + times**2, chain.num_units)
        latency = np.full(chain.num_units + 1, _INFINITE)
        latency[ends] = np.where(smallest < _INFINITE, smallest + compute[ends] + link, _INFINITE)
        origin.append((ranges.low, ends - ranges.width + choice))
    if len(origin) < chain.num_stages or latency[-1] >= _INFINITE:
        return None
    return _walk_back(origin, chain.num_units)


def _stage_times(chain: Chain, ranges: _Ranges, rows: Integers | slice) -> Integers:
    """Return the stage time of every range that ends in one of the rows."""
    compute, ends = chain.compute[ranges.stage], ranges.ends[rows]
    spent: Integers = compute[ends][:, None] - ranges.before(compute, np.int64(0))[rows]
    links: Integers = chain.link[ranges.stage, ends][:, None]
    return np.maximum(spent, links) if chain.overlap else spent + links


def _scatter(ends: Integers, values: npt.NDArray[Number], num_units: int) -> npt.NDArray[Number]:
    """Return an array with the values at their boundaries and 0 elsewhere."""
    result = np.zeros(num_units + 1, dtype=values.dtype)
    result[ends] = values
    return result


def _walk_back(origin: Sequence[tuple[int, Integers]], num_units: int) -> tuple[int, ...]:
    """Return the boundary after each stage, following the best start of each stage backwards."""
    ends = [num_units]
    for low, starts in reversed(origin[1:]):
        ends.append(int(starts[ends[-1] - low]))
    return tuple(reversed(ends))
