"""The cut and the treatment of each unit's activations together: the smallest bottleneck under a memory limit.

    each unit      keep · recompute · recompute attention alone · offload to the host
    a stage's      time    max(Σ forward, copies) + max(Σ backward + Σ recomputation, copies)
                           copies: Σ copied / rate + two units
                   memory  Σ fixed + in flight × (Σ saved − Σ gain) + the largest peak  ≤ limit

The *gain* of a treatment is what it saves between forward and backward, its *peak* what backward needs once more, for
the one unit that is recomputed or fetched. Copies of offloaded activations overlap with compute, in forward to the
host and in backward from it, so they cost nothing until they take longer. They begin after the first unit and end
before the last one, so they have the time of all units but two; the longest counts for both.

Exactness. For each range of units and each bound on the largest peak, all choices that no other choice beats in gain,
recomputation and copied bytes are kept (a Pareto frontier), so the cheapest choice of every range that fits is found. A
dynamic program over ranges then gives the smallest bottleneck, and a second one the smallest sum of stage times among
those. Frontiers are short for repeated blocks and in practice; one above `MAX_FRONTIER` entries is thinned out, and the
result is then marked as not exact: it fits, but may not be the best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

MAX_FRONTIER = 4096

Treatment: TypeAlias = Literal["keep", "recompute", "attention", "offload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreatmentCosts:
    """What becomes of a unit's activations, for one micro-batch."""

    gain_bytes: int
    """Activations that are not held between forward and backward."""
    peak_bytes: int
    """What backward adds while it is at this unit."""
    recompute_s: float = 0.0
    """Recomputation, which lengthens the backward."""
    copied_bytes: int = 0
    """Activations that are copied to the host, and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """One unit, for one micro-batch."""

    time_s: float
    """Forward and backward."""
    forward_s: float
    """Forward alone: what recomputation adds."""
    saved_bytes: int
    """Activations saved for backward."""
    input_bytes: int
    """What is saved instead if the unit is recomputed."""
    fixed_bytes: int = 0
    """Parameters, gradients, optimizer states and buffers."""
    attention: TreatmentCosts | None = None
    """Recomputation of attention alone; None where the unit has none."""
    can_offload: bool = False

    @property
    def gain_bytes(self) -> int:
        """Activations that recomputation saves."""
        return max(0, self.saved_bytes - self.input_bytes)

    def treatments(self) -> dict[Treatment, TreatmentCosts]:
        """Return what can be done instead of keeping the unit's activations, where it gains something."""
        treatments: dict[Treatment, TreatmentCosts] = {
            "recompute": TreatmentCosts(
                gain_bytes=self.gain_bytes, peak_bytes=self.gain_bytes, recompute_s=self.forward_s
            )
        }
        if self.attention is not None:
            treatments["attention"] = self.attention
        if self.can_offload:  # with the unit that is fetched ahead, which counts as large
            treatments["offload"] = TreatmentCosts(
                gain_bytes=self.saved_bytes, peak_bytes=2 * self.saved_bytes, copied_bytes=self.saved_bytes
            )
        return {name: costs for name, costs in treatments.items() if costs.gain_bytes > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimit:
    """The device of one stage."""

    memory_bytes: int
    in_flight: int = 1
    """Micro-batches whose activations the stage holds at once."""
    speed: float = 1.0
    """Relative to the device of the times."""
    host_bytes_per_s: float = math.inf
    """Rate of copies between the device and its host, in each direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The best cut and the treatment of each unit."""

    ends: tuple[int, ...]
    """Last unit of each stage."""
    treatments: tuple[Treatment, ...]
    """Of each unit."""
    stage_s: tuple[float, ...]
    """Time of each stage for one micro-batch."""
    stage_bytes: tuple[int, ...] = ()
    """Memory of each stage."""
    is_exact: bool = True

    @property
    def bottleneck_s(self) -> float:
        """Time of the slowest stage."""
        return max(self.stage_s)

    def units(self, treatment: Treatment) -> tuple[int, ...]:
        """Return the units with a treatment."""
        return tuple(index for index, name in enumerate(self.treatments) if name == treatment)

    @property
    def recomputed(self) -> tuple[int, ...]:
        return self.units("recompute")


def _time_s(
    stage: StageLimit, forward_s: float, backward_s: float, recompute_s: float, copied_bytes: int, longest_s: float
) -> float:
    """Return the time of a stage: compute, or the copies that it hides where these take longer."""
    copies_s = copied_bytes / stage.host_bytes_per_s + 2 * longest_s / stage.speed if copied_bytes else 0.0
    return max(forward_s / stage.speed, copies_s) + max((backward_s + recompute_s) / stage.speed, copies_s)


def stage_bytes(units: Sequence[UnitCosts], in_flight: int, treatments: Sequence[Treatment]) -> int:
    """Return the memory of a stage of these units."""
    chosen = [unit.treatments()[name] for unit, name in zip(units, treatments, strict=True) if name != "keep"]
    held = sum(unit.saved_bytes for unit in units) - sum(costs.gain_bytes for costs in chosen)
    fixed = sum(unit.fixed_bytes for unit in units)
    return fixed + in_flight * held + max((costs.peak_bytes for costs in chosen), default=0)


def solve(units: Sequence[UnitCosts], stages: Sequence[StageLimit]) -> MemoryPlan | None:
    """Choose the cut into these stages and the treatment of each unit; None if nothing fits."""
    if len(stages) > len(units):
        return None
    ranges = _Ranges(units, stages)
    num_units = len(units)
    best = _minimize(ranges, num_units, len(stages), math.inf, additive=False)
    if best is None:
        return None
    cheapest = _minimize(ranges, num_units, len(stages), best[0], additive=True)
    assert cheapest is not None, "the first program found stages within the bound"
    ends = cheapest[1]
    starts = [0, *(end + 1 for end in ends[:-1])]
    chosen = [ranges.cheapest(stage, a, b) for stage, (a, b) in enumerate(zip(starts, ends, strict=True))]
    return MemoryPlan(
        ends=tuple(ends),
        treatments=tuple(itertools.chain.from_iterable(treatments for _, treatments in chosen)),
        stage_s=tuple(seconds for seconds, _ in chosen),
        stage_bytes=tuple(
            stage_bytes(units[first : last + 1], stage.in_flight, treatments)
            for stage, first, last, (_, treatments) in zip(stages, starts, ends, chosen, strict=True)
        ),
        is_exact=ranges.is_exact,
    )


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


@dataclass(frozen=True, slots=True)
class _Choice:
    """Treatments of the units of a range, as a linked list from its last unit."""

    gain_bytes: int
    recompute_s: float
    copied_bytes: int
    treatment: Treatment = "keep"
    before: _Choice | None = None

    def with_unit(self, treatment: Treatment, costs: TreatmentCosts) -> _Choice:
        return _Choice(
            self.gain_bytes + costs.gain_bytes,
            self.recompute_s + costs.recompute_s,
            self.copied_bytes + costs.copied_bytes,
            treatment,
            self,
        )

    def treatments(self) -> tuple[Treatment, ...]:
        """Return the treatment of each unit, in order."""
        treatments, choice = [], self
        while choice.before is not None:
            treatments.append(choice.treatment)
            choice = choice.before
        return tuple(reversed(treatments))


_KEEP = TreatmentCosts(gain_bytes=0, peak_bytes=0)


class _Ranges:
    """The cheapest treatments of every range of units that fits on a stage."""

    def __init__(self, units: Sequence[UnitCosts], stages: Sequence[StageLimit]) -> None:
        self._units, self._stages = units, stages
        self.is_exact = True
        self._sums = [
            [0, *itertools.accumulate(values)]
            for values in (
                [unit.fixed_bytes for unit in units],
                [unit.saved_bytes for unit in units],
                [unit.forward_s for unit in units],
                [unit.time_s - unit.forward_s for unit in units],
            )
        ]
        self._treatments = [unit.treatments() for unit in units]
        self._peaks = sorted({costs.peak_bytes for options in self._treatments for costs in options.values()})
        self._frontiers: dict[tuple[int, int, int], list[_Choice]] = {}
        self._found: dict[tuple[StageLimit, int, int], tuple[float, tuple[Treatment, ...]]] = {}

    def cheapest(self, stage: int, first: int, last: int) -> tuple[float, tuple[Treatment, ...]]:
        """Return the time of the units first … last on a stage and their treatments; ∞: no fit."""
        key = self._stages[stage], first, last
        if key not in self._found:
            self._found[key] = self._search(*key)
        return self._found[key]

    def _search(self, stage: StageLimit, first: int, last: int) -> tuple[float, tuple[Treatment, ...]]:
        fixed, saved, forward_s, backward_s = (sums[last + 1] - sums[first] for sums in self._sums)
        excess = fixed + stage.in_flight * saved - stage.memory_bytes
        keep: tuple[Treatment, ...] = tuple("keep" for _ in range(first, last + 1))
        if excess <= 0:
            return _time_s(stage, forward_s, backward_s, 0.0, 0, 0.0), keep
        longest_s = max(unit.forward_s for unit in self._units[first : last + 1])
        best_s, best = math.inf, None
        for peak in self._peaks:
            needed = excess + peak
            for choice in self._frontier(first, last, peak):
                if stage.in_flight * choice.gain_bytes >= needed:
                    seconds = _time_s(stage, forward_s, backward_s, choice.recompute_s, choice.copied_bytes, longest_s)
                    if seconds < best_s:
                        best_s, best = seconds, choice
        return (math.inf, keep) if best is None else (best_s, best.treatments())

    def _frontier(self, first: int, last: int, peak: int) -> list[_Choice]:
        """Return the choices for units first … last with peaks up to `peak` that no other choice beats."""
        if last < first:
            return [_Choice(0, 0.0, 0)]
        key = first, last, peak
        if key not in self._frontiers:
            before = self._frontier(first, last - 1, peak)
            options: dict[Treatment, TreatmentCosts] = {"keep": _KEEP, **self._treatments[last]}
            choices = [
                choice.with_unit(name, costs)
                for name, costs in options.items()
                if costs.peak_bytes <= peak
                for choice in before
            ]
            self._frontiers[key] = self._thin(_undominated(choices))
        return self._frontiers[key]

    def _thin(self, frontier: list[_Choice]) -> list[_Choice]:
        while len(frontier) > MAX_FRONTIER:
            self.is_exact = False
            frontier = [*frontier[:-1:2], frontier[-1]]
        return frontier


def _undominated(choices: list[_Choice]) -> list[_Choice]:
    """Drop choices that another one beats in gain, recomputation and copied bytes; by falling gain."""
    kept: list[_Choice] = []
    steps: list[tuple[float, int]] = []  # of those kept so far: recomputation rising, copied bytes falling
    for choice in sorted(choices, key=lambda choice: (-choice.gain_bytes, choice.recompute_s, choice.copied_bytes)):
        point = choice.recompute_s, choice.copied_bytes
        if any(seconds <= point[0] and copied <= point[1] for seconds, copied in steps):
            continue
        kept.append(choice)
        steps = [*(step for step in steps if not (point[0] <= step[0] and point[1] <= step[1])), point]
    return kept[::-1]
