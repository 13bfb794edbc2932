"""Where a search takes its costs from: a model measured at some sizes of micro-batch, and in between by straight lines.

seconds and bytes of a unit = a + b · samples        through the two nearest sizes that were measured
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from stagewright.errors import UsageError
from stagewright.planner.costs.measure import REPEATS, ModelCosts, measure_model
from stagewright.profiler.profile import Amount, Profile, Time, UnitProfile
from stagewright.simulator.costs.tensor_traffic import TensorTraffic
from stagewright.simulator.costs.overheads import ModelOverheads
from stagewright.spec.plan import Mesh, Plan

__all__ = ["MeasuredCostSource", "CostSource", "interpolate_at", "between", "source_for_plan"]


class CostSource(Protocol):
    """What a search asks of a model."""

    @property
    def num_units(self) -> int:
        """Places where it could be cut, and one."""

    def tensor_sizes(self, most: int) -> list[int]:
        """Numbers of workers that its layers can be divided among."""

    def model(self, size: int, tensor: int) -> ModelCosts:
        """What a micro-batch of that size costs."""

    def measure_size(self, size: int, tensor: int) -> bool:
        """Take that size from a measurement of its own from now on; False where nothing is changed by that."""


@dataclass(slots=True, kw_only=True)
class MeasuredCostSource:
    """A model that is measured when it is asked for."""

    plan: Plan
    """A plan with the model, its dtype, its optimiser and a device."""
    small: int
    """The sizes of micro-batches that are measured."""
    large: int
    longest_s: float = 60.0
    """Measuring a further size may take as long as this, by what is known of it."""
    repeats: int = REPEATS
    """Rounds of measuring."""
    measure: Callable[[Plan, int], ModelCosts] = lambda plan, size: measure_model(plan, size=size)
    """Measures a plan's model at a size."""
    _found: dict[tuple[int, int], ModelCosts] = field(default_factory=dict)
    _lines: dict[tuple[int, int, int, int], ModelCosts] = field(default_factory=dict)
    _refused: dict[int, str] = field(default_factory=dict)
    _failed: set[tuple[int, int]] = field(default_factory=set)

    @property
    def num_units(self) -> int:
        return len(self._at(self.small, 1).profile.units)

    def tensor_sizes(self, most: int) -> list[int]:
        found = [1]
        for size in range(2, most + 1):
            try:
                self._at(self.small, size)
            except UsageError as error:
                self._refused[size] = str(error)
                continue
            found.append(size)
        return found

    def refusal(self, tensor: int) -> str | None:
        """Why layers can't be divided among so many."""
        return self._refused.get(tensor)

    def measure_size(self, size: int, tensor: int) -> bool:
        known = (size, tensor) in self._found or (size, tensor) in self._failed
        if known or self.seconds_of(size, tensor) > self.longest_s:
            return False
        try:
            self._at(size, tensor)
        except (ValueError, RuntimeError):  # batch norm of one sample, too little memory: it stays on the line
            self._failed.add((size, tensor))
            return False
        return True

    def seconds_of(self, size: int, tensor: int) -> float:
        """About how long it takes to measure a size: each round runs the model whole, and its units one by one."""
        profile = self.model(size, tensor).profile
        once = sum(unit.total_s for unit in profile.units) * size / profile.batch_size
        return 3 * (self.repeats + 2) * once

    def model(self, size: int, tensor: int) -> ModelCosts:
        if (size, tensor) in self._found or size in (self.small, self.large):
            return self._at(size, tensor)
        if self.small == self.large:
            return self._at(self.small, tensor)
        low, high = _around(size, sorted({self.small, self.large} | {one for one, of in self._found if of == tensor}))
        if (size, tensor, low, high) not in self._lines:
            self._lines[size, tensor, low, high] = between(self._at(low, tensor), self._at(high, tensor), size)
        return self._lines[size, tensor, low, high]

    def _at(self, size: int, tensor: int) -> ModelCosts:
        if (size, tensor) not in self._found:
            plan = replace(
                self.plan, mesh=Mesh(tensor=tensor), batch=size, microbatches=1, devices=self.plan.devices[:1]
            )
            self._found[size, tensor] = self.measure(plan, size)
        return self._found[size, tensor]


def _around(size: int, known: list[int]) -> tuple[int, int]:
    """Of sizes in order, the two that another lies between; or that are nearest, where it lies beyond all."""
    at = min(max(1, bisect.bisect(known, size)), len(known) - 1)
    return known[at - 1], known[at]


def source_for_plan(
    plan: Plan, measured: ModelCosts, measure: Callable[[Plan, int], ModelCosts], *, repeats: int = REPEATS
) -> MeasuredCostSource:
    """Other sizes for a plan that was measured at its own: by the line through that and twice as much, or half."""
    own, tensor = measured.profile.batch_size, plan.mesh.tensor
    half = own // 2 if own >= 4 else own  # of single samples not every model can be trained
    other = 2 * own if 2 * own <= plan.batch else half

    def known(other_plan: Plan, size: int) -> ModelCosts:
        return measured if (size, other_plan.mesh.tensor) == (own, tensor) else measure(other_plan, size)

    return MeasuredCostSource(
        plan=plan, small=min(own, other), large=max(own, other), longest_s=30.0, repeats=repeats, measure=known
    )


def interpolate_at(models: Sequence[ModelCosts], size: int) -> ModelCosts:
    """What a size costs by measurements of others: its own, or the line through the two nearest."""
    known = {one.profile.batch_size: one for one in models}
    if size in known or len(known) == 1:
        return known.get(size, models[0])
    low, high = _around(size, sorted(known))
    return between(known[low], known[high], size)


def between(small: ModelCosts, large: ModelCosts, size: int) -> ModelCosts:
    """The line through two measurements, at another size; nothing falls below nothing."""
    first, second = small.profile, large.profile
    share = (size - first.batch_size) / (second.batch_size - first.batch_size)

    def line(one: float, other: float) -> float:
        return max(0.0, one + share * (other - one))

    def time(one: Time, other: Time) -> Time:
        # Beyond noise, a larger batch never takes less.
        return Time(median_s=max(line(one.median_s, other.median_s), 1e-9 if one.median_s else 0.0), spread_s=0.0)

    def amount(one: Amount, other: Amount) -> Amount:
        shares = one.shares
        if [index for index, _ in one.shares] == [index for index, _ in other.shares]:
            pairs = zip(one.shares, other.shares, strict=True)
            shares = tuple((index, round(line(mine, theirs))) for (index, mine), (_, theirs) in pairs)
        return Amount(total=round(line(one.total, other.total)), shares=shares)

    def unit(one: UnitProfile, other: UnitProfile) -> UnitProfile:
        return replace(
            one,
            macs=round(line(one.macs, other.macs)),
            forward=time(one.forward, other.forward),
            backward_input=time(one.backward_input, other.backward_input),
            backward_weight=time(one.backward_weight, other.backward_weight),
            output_bytes=round(line(one.output_bytes, other.output_bytes)),
            saved_bytes=amount(one.saved_bytes, other.saved_bytes),
            recompute_saved_bytes=round(line(one.recompute_saved_bytes, other.recompute_saved_bytes)),
            crossing_bytes=round(line(one.crossing_bytes, other.crossing_bytes)),
            forward_working_bytes=round(line(one.forward_working_bytes, other.forward_working_bytes)),
            backward_working_bytes=round(line(one.backward_working_bytes, other.backward_working_bytes)),
            glue_s=line(one.glue_s, other.glue_s),
        )

    profile: Profile = replace(
        first,
        batch_size=size,
        source="line",
        units=tuple(unit(one, other) for one, other in zip(first.units, second.units, strict=True)),
        whole_forward=time(first.whole_forward, second.whole_forward),
        whole_backward=time(first.whole_backward, second.whole_backward),
        whole_macs=round(line(first.whole_macs, second.whole_macs)),
    )
    mine, theirs = small.terms, large.terms
    terms = ModelOverheads(
        loss_forward_s=line(mine.loss_forward_s, theirs.loss_forward_s),
        loss_backward_s=line(mine.loss_backward_s, theirs.loss_backward_s),
        loss_kept_bytes=round(line(mine.loss_kept_bytes, theirs.loss_kept_bytes)),
        optimizer_s_per_byte=(mine.optimizer_s_per_byte + theirs.optimizer_s_per_byte) / 2,
        accumulate_s_per_byte=(mine.accumulate_s_per_byte + theirs.accumulate_s_per_byte) / 2,
        split_input=(mine.split_input + theirs.split_input) / 2,
        split_weight=(mine.split_weight + theirs.split_weight) / 2,
        split_held_share=(mine.split_held_share + theirs.split_held_share) / 2,
        statistics_s=(mine.statistics_s + theirs.statistics_s) / 2,
        statistics_bytes=mine.statistics_bytes,
        loss_forward_working_bytes=round(line(mine.loss_forward_working_bytes, theirs.loss_forward_working_bytes)),
        loss_backward_working_bytes=round(line(mine.loss_backward_working_bytes, theirs.loss_backward_working_bytes)),
        optimizer_working_share=max(mine.optimizer_working_share, theirs.optimizer_working_share),
        workspace_bytes=max(mine.workspace_bytes, theirs.workspace_bytes),
    )
    tensor = None
    if small.tensor is not None and large.tensor is not None:
        tensor = tuple(
            TensorTraffic(
                forward_bytes=tuple(
                    round(line(a, b)) for a, b in zip(one.forward_bytes, other.forward_bytes, strict=True)
                ),
                backward_bytes=tuple(
                    round(line(a, b)) for a, b in zip(one.backward_bytes, other.backward_bytes, strict=True)
                ),
            )
            for one, other in zip(small.tensor, large.tensor, strict=True)
        )
    whole = None
    if small.whole is not None and large.whole is not None:
        lone = (
            ModelCosts(profile=small.whole, terms=small.terms),
            ModelCosts(profile=large.whole, terms=large.terms),
        )
        whole = between(*lone, size).profile
    return ModelCosts(profile=profile, terms=terms, tensor=tensor, num_tensor=small.num_tensor, whole=whole)
