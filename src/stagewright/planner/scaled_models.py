"""Costs of a model at any number of layers, samples or tokens, interpolated per unit between two measurements."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from stagewright.analytic.forecast import step_model
from stagewright.analytic.hardware.devices import accelerators
from stagewright.analytic.plan_layout import layout_of
from stagewright.analytic.shape import TransformerShape
from stagewright.cluster.cluster import Cluster, DeviceGroup
from stagewright.planner.costs.interpolation import interpolate
from stagewright.planner.costs.layer_scaling import with_num_layers
from stagewright.planner.costs.measure import ModelCosts, measure_model, plan_microbatch_sizes
from stagewright.planner.costs.source import MeasuredCostSource
from stagewright.planner.fit import SizedMemory, SizedModel, SizeKind, SizeLimit
from stagewright.spec.plan import ModelSpec, Plan
from stagewright.spec.plan_rules import check_plan
from stagewright.zoo.named.catalog import MAX_LAYERS
from stagewright.zoo.named.language import longest_sequence

_LENGTHS = (64, 128)  # measured sequence lengths
# Opens a progress display for measuring a plan's model at a size.
ProgressFactory: TypeAlias = Callable[[Plan, int], AbstractContextManager[Callable[[int, int, str], None] | None]]


def scaled_models(
    kind: SizeKind,
    family: str,
    *,
    cache: str | Path | bool = True,
    progress: ProgressFactory = lambda plan, size: nullcontext(),
) -> SizedModel:
    """Return a function that gives a model's costs at any size.

    ``family`` is the part of a model's name before its number of layers.
    """
    models = _ScaledModels(family, cache, progress)
    return {"batch": models.at_batch, "layers": models.at_layers, "sequence": models.at_length}[kind]


def analytic_memory(kind: SizeKind, shape: TransformerShape) -> SizedMemory:
    """Return a function that computes a plan's peak memory at any size, from formulas."""
    device = accelerators()["A100"]  # sizes do not depend on the device's speed

    def sized(plan: Plan, size: int) -> tuple[Plan, int]:
        model = shape
        if kind == "batch":
            plan = replace(plan, batch=size)
        elif kind == "layers":
            model = replace(shape, num_layers=max(size, plan.num_stages))
        else:
            model = shape.with_length(size)
        check_plan(plan)
        layout = layout_of(plan, model.num_layers)
        if plan.mesh.pipeline == 1 and not plan.shard:
            layout = replace(layout, checkpoint_segments=None)  # each block, as a measured fit does
        group = DeviceGroup(kind="cuda", count=plan.mesh.num_workers, hardware=device.name)
        step = step_model(model, layout, Cluster(devices=(group,)), device)
        step = step.balanced() if layout.pipeline > 1 else step
        return plan, max(rank.peak_bytes for rank in step.memory())

    return sized


@dataclass(slots=True)
class _ScaledModels:
    """Measured models, by specification."""

    family: str
    cache: str | Path | bool
    progress: ProgressFactory
    sources: dict[ModelSpec, MeasuredCostSource] = field(default_factory=dict)

    def at_batch(self, plan: Plan, size: int) -> tuple[Plan, ModelCosts]:
        sized = replace(plan, batch=size)
        return sized, self._source(plan).model(max(plan_microbatch_sizes(sized)), plan.mesh.tensor)

    def at_layers(self, plan: Plan, size: int) -> tuple[Plan, ModelCosts]:
        """Measure a few layers; further ones cost as much as the middle one."""
        num_measured, num_layers = max(4, plan.num_stages), max(size, plan.num_stages)
        measured = self._source(self._with_layers(plan, num_measured))
        model = measured.model(max(plan_microbatch_sizes(plan)), plan.mesh.tensor)
        return self._with_layers(plan, num_layers), with_num_layers(model, num_layers)

    def at_length(self, plan: Plan, size: int) -> tuple[Plan, ModelCosts]:
        """Interpolate over the sequence length; attention that saves its weights grows faster than linearly."""
        samples = max(plan_microbatch_sizes(plan))
        ends = []
        for length in _LENGTHS:
            sized = replace(plan, model=replace(plan.model, sequence_length=length))
            model = self._source(sized).model(samples, plan.mesh.tensor)
            # `interpolate` works on batch sizes: put the length in their place.
            ends.append(replace(model, profile=replace(model.profile, batch_size=length), whole=None))
        small, large = ends
        model = interpolate(small, large, size)
        sized = replace(plan, model=replace(plan.model, sequence_length=size))
        return sized, replace(model, profile=replace(model.profile, batch_size=samples))

    def _with_layers(self, plan: Plan, num_layers: int) -> Plan:
        return replace(plan, model=replace(plan.model, name=f"{self.family}:{num_layers}"))

    def _source(self, plan: Plan) -> MeasuredCostSource:
        if plan.model not in self.sources:
            self.sources[plan.model] = MeasuredCostSource(plan=plan, small=2, large=4, measure=self._measure)
        return self.sources[plan.model]

    def _measure(self, plan: Plan, size: int) -> ModelCosts:
        with self.progress(plan, size) as report:
            return measure_model(plan, size=size, cache=self.cache, repeats=1, progress=report)


def size_limit(kind: SizeKind, plan: Plan) -> SizeLimit:
    """Return the largest possible size of a model regardless of memory."""
    if kind == "layers":
        return SizeLimit(size=MAX_LAYERS, reason=f"models have at most {MAX_LAYERS} layers")
    if kind == "sequence":
        longest = longest_sequence(getattr(plan.model.load(batch=2).module, "config", None))
        if longest is not None:
            return SizeLimit(size=longest, reason=f"{plan.model.name} takes sequences of at most {longest} tokens")
    return SizeLimit()
