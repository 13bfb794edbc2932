"""A model at any number of layers, samples or tokens: each unit by a straight line through two measurements."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from stagewright.planner.costs.measure import ModelCosts, plan_microbatch_sizes, measure_model
from stagewright.planner.costs.layer_scaling import with_num_layers
from stagewright.planner.costs.source import MeasuredCostSource, between
from stagewright.planner.fit import SizeLimit, SizedModel, What
from stagewright.spec.plan import Plan
from stagewright.zoo.named.catalog import MOST_LAYERS
from stagewright.zoo.named.language import longest_sequence

__all__ = ["size_limit", "scaled_models"]

_LENGTHS = (64, 128)  # tokens that are measured
Told = Callable[[Plan, int], AbstractContextManager[Callable[[int, int, str], None] | None]]


def scaled_models(
    what: What,
    family: str,
    *,
    cache: str | Path | bool = True,
    told: Told = lambda plan, size: nullcontext(),
) -> SizedModel:
    """Models of the size that is asked for; `family` is the part of a name before its number of layers."""
    sources: dict[Any, MeasuredCostSource] = {}
    lines: dict[Any, ModelCosts] = {}

    def measure(plan: Plan, size: int) -> ModelCosts:
        with told(plan, size) as report:
            return measure_model(plan, size=size, cache=cache, repeats=1, progress=report)

    def source(plan: Plan) -> MeasuredCostSource:
        key = plan.model
        if key not in sources:
            sources[key] = MeasuredCostSource(plan=plan, small=2, large=4, measure=measure)
        return sources[key]

    def sized(plan: Plan, size: int) -> tuple[Plan, ModelCosts]:
        if what == "batch":
            chosen = replace(plan, batch=size)
            return chosen, source(plan).model(max(plan_microbatch_sizes(chosen)), plan.mesh.tensor)
        samples = max(plan_microbatch_sizes(plan))
        if what == "layers":
            # A few layers are measured; more of them are as the middle one is.
            few = max(4, plan.num_stages)
            model = source(replace(plan, model=replace(plan.model, name=f"{family}:{few}"))).model(
                samples, plan.mesh.tensor
            )
            wanted = max(size, plan.num_stages)
            chosen = replace(plan, model=replace(plan.model, name=f"{family}:{wanted}"))
            return chosen, with_num_layers(model, wanted)
        ends = []
        for length in _LENGTHS:
            at = replace(plan, model=replace(plan.model, sequence_length=length))
            key = length, samples, plan.mesh.tensor
            if key not in lines:
                lines[key] = source(at).model(samples, plan.mesh.tensor)
            ends.append(lines[key])
        # Tokens of a sample play the part of samples; attention that keeps its weights grows faster than this line.
        small, large = (
            replace(one, profile=replace(one.profile, batch_size=length), whole=None)
            for one, length in zip(ends, _LENGTHS, strict=True)
        )
        found = between(small, large, size)
        back = replace(found, profile=replace(found.profile, batch_size=samples))
        return replace(plan, model=replace(plan.model, sequence_length=size)), back

    return sized


def size_limit(what: What, plan: Plan) -> SizeLimit:
    """How large a model can be made at all, whatever memory there is."""
    name = plan.model.name
    if what == "layers":
        return SizeLimit(size=MOST_LAYERS, reason=f"models of at most {MOST_LAYERS} layers are made")
    if what == "sequence":
        longest = longest_sequence(getattr(plan.model.load(batch=2).module, "config", None))
        if longest is not None:
            return SizeLimit(size=longest, reason=f"{name} takes sequences of at most {longest} tokens")
    return SizeLimit()
