"""Sources of a model's costs: measured at some micro-batch sizes, interpolated in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from stagewright.errors import UsageError
from stagewright.planner.costs.interpolation import interpolate, nearest_sizes
from stagewright.planner.costs.measure import (
    REPEATS,
    ModelCosts,
    measure_model,
    plan_microbatch_sizes,
    plans_by_degree,
    with_degrees,
)
from stagewright.spec.plan import Mesh, Plan


class CostSource(Protocol):
    """Costs of a model at any micro-batch size and tensor parallel size."""

    @property
    def num_units(self) -> int:
        """Number of units, the upper limit of stages."""

    def tensor_sizes(self, largest: int) -> list[int]:
        """Return the tensor parallel sizes that the model supports."""

    @property
    def num_experts(self) -> int:
        """Experts of each mixture-of-experts layer, of which expert parallel sizes are divisors; 1 without."""

    def model(self, size: int, tensor: int) -> ModelCosts:
        """Return the costs of a micro-batch of that size."""

    def measure_size(self, size: int, tensor: int) -> bool:
        """Measure that size instead of interpolating it; False if that changes nothing."""


@dataclass(slots=True, kw_only=True)
class MeasuredCostSource:
    """A model that is measured on demand."""

    plan: Plan
    """A plan with the model, its precision, its optimizer and a device."""
    small: int
    """The first measured micro-batch size."""
    large: int
    """The second measured micro-batch size."""
    max_measure_s: float = 60.0
    """Longest expected duration of measuring a further size."""
    repeats: int = REPEATS
    """Measurement rounds."""
    measure: Callable[[Plan, int], ModelCosts] = lambda plan, size: measure_model(plan, size=size)
    """Measures a plan's model at a size."""
    _measured: dict[tuple[int, int], ModelCosts] = field(default_factory=dict)
    _interpolated: dict[tuple[int, int, int, int], ModelCosts] = field(default_factory=dict)
    _failed: set[tuple[int, int]] = field(default_factory=set)

    @property
    def num_units(self) -> int:
        return len(self._measure(self.small, 1).profile.units)

    def tensor_sizes(self, largest: int) -> list[int]:
        sizes = [1]
        for size in range(2, largest + 1):
            try:
                self._measure(self.small, size)
            except UsageError:
                continue
            sizes.append(size)
        return sizes

    @property
    def num_experts(self) -> int:
        return self._measure(self.small, 1).num_experts

    def measure_size(self, size: int, tensor: int) -> bool:
        is_known = (size, tensor) in self._measured or (size, tensor) in self._failed
        if is_known or self.measurement_s(size, tensor) > self.max_measure_s:
            return False
        try:
            self._measure(size, tensor)
        except (ValueError, RuntimeError):  # batch norm of one sample, out of memory: keep the interpolation
            self._failed.add((size, tensor))
            return False
        return True

    def measurement_s(self, size: int, tensor: int) -> float:
        """Estimate how long measuring a size takes: each round runs the whole model and each unit."""
        profile = self.model(size, tensor).profile
        microbatch_s = sum(unit.total_s for unit in profile.units) * size / profile.batch_size
        return 3 * (self.repeats + 2) * microbatch_s

    def model(self, size: int, tensor: int) -> ModelCosts:
        if (size, tensor) in self._measured or size in (self.small, self.large):
            return self._measure(size, tensor)
        if self.small == self.large:
            return self._measure(self.small, tensor)
        measured = {known for known, known_tensor in self._measured if known_tensor == tensor}
        low, high = nearest_sizes(size, sorted({self.small, self.large} | measured))
        key = size, tensor, low, high
        if key not in self._interpolated:
            self._interpolated[key] = interpolate(self._measure(low, tensor), self._measure(high, tensor), size)
        return self._interpolated[key]

    def _measure(self, size: int, tensor: int) -> ModelCosts:
        if (size, tensor) not in self._measured:
            plan = replace(
                self.plan, mesh=Mesh(tensor=tensor), batch=size, microbatches=1, devices=self.plan.devices[:1]
            )
            self._measured[size, tensor] = self.measure(plan, size)
        return self._measured[size, tensor]


def plan_costs_of(source: CostSource, plan: Plan) -> ModelCosts:
    """Return the costs that a plan's forecast needs: of its largest micro-batch, at each of its tensor degrees."""
    size = max(plan_microbatch_sizes(plan))
    if not plan.mesh.tensor_degrees:
        return source.model(size, plan.mesh.tensor)
    return with_degrees([source.model(size, one.mesh.tensor) for one in plans_by_degree(plan)])


def measure_plan_size(source: CostSource, plan: Plan) -> bool:
    """Measure the size of a plan's largest micro-batch at each of its tensor degrees; False if that changes nothing."""
    size = max(plan_microbatch_sizes(plan))
    changed = [source.measure_size(size, one.mesh.tensor) for one in plans_by_degree(plan)]
    return any(changed)


def source_for_plan(
    plan: Plan, measured: ModelCosts, measure: Callable[[Plan, int], ModelCosts], *, repeats: int = REPEATS
) -> MeasuredCostSource:
    """Return a source for other sizes of a measured plan: interpolated with twice its size, or half."""
    own, known = measured.profile.batch_size, {costs.num_tensor: costs for costs in (measured, *measured.other_degrees)}
    half = own // 2 if own >= 4 else own  # not every model can train on single samples
    second = 2 * own if 2 * own <= plan.batch else half

    def measure_or_reuse(sized_plan: Plan, size: int) -> ModelCosts:
        reused = known.get(sized_plan.mesh.tensor) if size == own else None
        return measure(sized_plan, size) if reused is None else reused

    return MeasuredCostSource(
        plan=plan,
        small=min(own, second),
        large=max(own, second),
        max_measure_s=30.0,
        repeats=repeats,
        measure=measure_or_reuse,
    )
