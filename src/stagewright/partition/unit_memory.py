"""The cut and the recomputed units together: the smallest bottleneck under a memory limit.

    stage of units a … b     time    Σ time + Σ forward of its recomputed units
    R: recomputed units      memory  Σ fixed + in flight × (Σ saved − Σ gain of R) + the largest gain of R  ≤ limit

The *gain* of a unit is what recomputing it saves: its saved activations without its inputs. Backward needs it once
more, for the one unit that is being recomputed.

Exactness. For each range of units and each bound on the largest gain, all subsets of units that no other subset beats
in both gain and time are kept (a Pareto frontier), so the cheapest subset of every range that fits is found. A dynamic
program over ranges then gives the smallest bottleneck, and a second one the smallest sum of stage times among those.
Frontiers are short for repeated blocks and in practice; one above `MAX_FRONTIER` entries is thinned out, and the
result is then marked as not exact: it fits, but may not be the best.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

MAX_FRONTIER = 4096

# (gain, time, bits of the units), both increasing.
_Frontier: TypeAlias = list[tuple[int, float, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """One unit, for one micro-batch."""

    time_s: float
    """Forward and backward."""
    forward_s: float
    """What recomputation adds."""
    saved_bytes: int
    """Activations saved for backward."""
    input_bytes: int
    """What is saved instead if the unit is recomputed."""
    fixed_bytes: int = 0
    """Parameters, gradients, optimizer states and buffers."""

    @property
    def gain_bytes(self) -> int:
        """Activations that recomputation saves."""
        return max(0, self.saved_bytes - self.input_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimit:
    """The device of one stage."""

    memory_bytes: int
    in_flight: int = 1
    """Micro-batches whose activations the stage holds at once."""
    speed: float = 1.0
    """Relative to the device of the times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The best cut and the recomputed units."""

    ends: tuple[int, ...]
    """Last unit of each stage."""
    recomputed: tuple[int, ...]
    stage_s: tuple[float, ...]
    """Time of each stage for one micro-batch, with recomputation."""
    stage_bytes: tuple[int, ...] = ()
    """Memory of each stage."""
    is_exact: bool = True

    @property
    def bottleneck_s(self) -> float:
        """Time of the slowest stage."""
        return max(self.stage_s)


def solve(units: Sequence[UnitCosts], stages: Sequence[StageLimit]) -> MemoryPlan | None:
    """Choose the cut into these stages and the units to recompute; None if nothing fits."""
    if len(stages) > len(units):
        return None
    ranges = _Ranges(units, stages)
    num_units = len(units)
    best = _minimize(ranges, num_units, len(stages), math.inf, additive=False)
    if best is None:
        return None
    found = _minimize(ranges, num_units, len(stages), best[0], additive=True)
    assert found is not None, "the first program found stages within the bound"
    ends = found[1]
    starts = [0, *(end + 1 for end in ends[:-1])]
    chosen = [ranges.cheapest(stage, a, b) for stage, (a, b) in enumerate(zip(starts, ends, strict=True))]
    recomputed = [unit for _, bits in chosen for unit in range(num_units) if bits >> unit & 1]
    return MemoryPlan(
        ends=tuple(ends),
        recomputed=tuple(recomputed),
        stage_s=tuple(seconds for seconds, _ in chosen),
        stage_bytes=tuple(
            stage_bytes(units[first : last + 1], stage.in_flight, [bits >> unit & 1 for unit in range(first, last + 1)])
            for stage, first, last, (_, bits) in zip(stages, starts, ends, chosen, strict=True)
        ),
        is_exact=ranges.is_exact,
    )


def stage_bytes(units: Sequence[UnitCosts], in_flight: int, recomputed: Sequence[int]) -> int:
    """Return the memory of a stage of these units, each with whether it is recomputed."""
    pairs = list(zip(units, recomputed, strict=True))
    held = sum(unit.saved_bytes - (unit.gain_bytes if again else 0) for unit, again in pairs)
    fixed = sum(unit.fixed_bytes for unit in units)
    return fixed + in_flight * held + max((unit.gain_bytes for unit, again in pairs if again), default=0)


def _minimize(
    ranges: _Ranges, num_units: int, num_stages: int, bound_s: float, *, additive: bool
) -> tuple[float, list[int]] | None:
    """Return the smallest sum (or maximum) of stage times within a bound, and the last unit of each stage."""
    reached: list[tuple[float, list[int]] | None] = [None] * num_units
    for stage in range(num_stages):
        following: list[tuple[float, list[int]] | None] = [None] * num_units
        for end in range(stage, num_units - (num_stages - 1 - stage)):
            for start in range(stage, end + 1) if stage else (0,):
                before = (0.0, []) if stage == 0 else reached[start - 1]
                if before is None:
                    continue
                seconds = ranges.cheapest(stage, start, end)[0]
                total = before[0] + seconds if additive else max(before[0], seconds)
                current = following[end]
                if seconds <= bound_s and math.isfinite(total) and (current is None or total < current[0]):
                    following[end] = total, [*before[1], end]
        reached = following
    return reached[-1]


class _Ranges:
    """The cheapest recomputation of every range of units that fits on a stage."""

    def __init__(self, units: Sequence[UnitCosts], stages: Sequence[StageLimit]) -> None:
        self._units, self._stages = units, stages
        self.is_exact = True
        self._sums = [
            [0, *itertools.accumulate(values)]
            for values in (
                [unit.fixed_bytes for unit in units],
                [unit.saved_bytes for unit in units],
                [unit.time_s for unit in units],
            )
        ]
        self._largest = sorted({unit.gain_bytes for unit in units if unit.gain_bytes})
        self._frontiers: dict[tuple[int, int, int], _Frontier] = {}
        self._found: dict[tuple[StageLimit, int, int], tuple[float, int]] = {}

    def cheapest(self, stage: int, first: int, last: int) -> tuple[float, int]:
        """Return the time of the units first … last on a stage and the bits of the recomputed ones; ∞: no fit."""
        key = self._stages[stage], first, last
        if key not in self._found:
            self._found[key] = self._search(*key)
        return self._found[key]

    def _search(self, stage: StageLimit, first: int, last: int) -> tuple[float, int]:
        fixed, saved, time_s = (sums[last + 1] - sums[first] for sums in self._sums)
        excess = fixed + stage.in_flight * saved - stage.memory_bytes
        if excess <= 0:
            return time_s / stage.speed, 0
        best = math.inf, 0
        for largest in self._largest:
            needed = -(-(excess + largest) // stage.in_flight)
            frontier = self._frontier(first, last, largest)
            index = bisect.bisect_left(frontier, (needed, -math.inf, 0))
            if index < len(frontier) and frontier[index][1] < best[0]:
                best = frontier[index][1:]
        return (time_s + best[0]) / stage.speed, best[1]

    def _frontier(self, first: int, last: int, largest: int) -> _Frontier:
        """Return the subsets of units first … last with gains up to `largest` that no other subset beats."""
        if last < first:
            return [(0, 0.0, 0)]
        key = first, last, largest
        if key not in self._frontiers:
            before, unit = self._frontier(first, last - 1, largest), self._units[last]
            if not 0 < unit.gain_bytes <= largest:
                self._frontiers[key] = before
            else:
                bit = 1 << last
                added = [(gain + unit.gain_bytes, s + unit.forward_s, bits | bit) for gain, s, bits in before]
                self._frontiers[key] = self._thin(_undominated(before, added))
        return self._frontiers[key]

    def _thin(self, frontier: _Frontier) -> _Frontier:
        while len(frontier) > MAX_FRONTIER:
            self.is_exact = False
            frontier = [*frontier[:-1:2], frontier[-1]]
        return frontier


def _undominated(first: _Frontier, second: _Frontier) -> _Frontier:
    """Merge two frontiers; drop entries that another one beats in gain and time."""
    kept: _Frontier = []
    for entry in sorted([*first, *second], key=lambda entry: (-entry[0], entry[1])):
        if not kept or entry[1] < kept[-1][1]:
            kept.append(entry)
    return kept[::-1]
