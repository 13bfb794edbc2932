"""Why a plan's speed-up is not n, and the one change that would gain most.

A run is explained by its own events: the stages' times as they were measured there, the rest as forecast, and what is
then left as *unexplained*. Serial is the run's own, or else the quickest way on one device, as in a search.

Changes are tried one by one, each with a forecast of its own: a cut moved by a unit, other numbers of micro-batches,
another schedule, no recomputation, data instead of pipeline or tensor, pipeline instead of data. Other sizes of
micro-batch are by what is known of two; that of the change which gains most is measured, until one of those that were
is the best.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stagewright.display import Displayed
from stagewright.errors import UsageError
from stagewright.planner.baseline import baseline_plan, fastest_baseline
from stagewright.planner.costs.measure import plan_microbatch_sizes
from stagewright.planner.forecast import PreparedPlan, profiled_size
from stagewright.runs.baseline import serial_beside
from stagewright.runs.run_folder import RunFolder
from stagewright.schedules.catalog import SCHEDULES
from stagewright.simulator.costs.plan_costs import PlanCosts, StageCosts
from stagewright.simulator.simulate import predict, step_seconds
from stagewright.simulator.what_if import SpeedupBreakdown, explain_speedup
from stagewright.spec.plan import Mesh, Plan

__all__ = ["Change", "Explanation", "explain_plan", "explain_run", "baseline_step_s", "rank_changes"]

_LEAST_GAIN = 0.01
_HALVES = ("backward-input", "backward-weight")
_TIMED = ("forward", "backward", *_HALVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something that could be done otherwise."""

    what: str
    """What, as a person would say it."""
    step_s: float
    """The step's time then."""
    gain: float
    """How much more samples a second that is: 0.04 is 4 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Displayed):
    """Why the speed-up is not n."""

    plan: Plan
    parts: SpeedupBreakdown
    """The parts."""
    is_measured: bool
    """Whether step_s was measured, or forecast."""
    change: Change | None
    """The change that would gain most; None: none of those tried gains a hundredth."""
    num_tried: int | None = None
    """How many changes were tried, of those that fit; None: none was looked for."""

    @property
    def title(self) -> str:
        """The plan, and whether its step was measured."""
        mesh, source = self.plan.mesh, "measured" if self.is_measured else "forecast"
        return f"{self.plan.model.name}: {mesh.strategy} on {mesh.num_workers} workers, {source}"

    @property
    def advice(self) -> str:
        """The change that gains most, as a phrase."""
        if self.num_tried is None:
            return "not searched: no real plan has these costs"
        if self.change is not None:
            return f"{self.change.what}: {self.change.gain:+.0%} (forecast)"
        if self.num_tried == 0:
            return "unknown: no other plan fits"
        return f"none of the {self.num_tried} changes tried gains 1 %"

    def to_dict(self) -> dict[str, Any]:
        parts = self.parts
        lost = dict(parts.lost_speedup())
        return {
            "num_devices": parts.num_devices,
            "serial_s": parts.serial_s,
            "ideal_s": parts.ideal_s,
            "step_s": parts.step_s,
            "speedup": parts.speedup,
            "is_measured": self.is_measured,
            "parts": [
                {"name": one.name, "seconds": one.seconds, "lost_speedup": lost[one.name]} for one in parts.parts
            ],
            "change": None
            if self.change is None
            else {"what": self.change.what, "step_s": self.change.step_s, "gain": self.change.gain},
            "num_tried": self.num_tried or 0,
        }


def explain_plan(prepared: PreparedPlan, *, changes: bool = True) -> Explanation:
    """A plan's forecast, explained; without `changes` none is looked for (costs that no plan has can't be compared)."""
    parts = explain_speedup(prepared.costs, serial_s=_serial_s(prepared))
    return _explanation(prepared.plan, parts, rank_changes(prepared) if changes else None, is_measured=False)


def explain_run(prepared: PreparedPlan, folder: RunFolder) -> Explanation:
    """A run, explained with the times of its own stages."""
    result = folder.result()
    if result is None or not result.is_timed:
        raise UsageError(f"{folder.path} has no measured steps: explain a run that `stagewright compare` has finished")
    serial_s = baseline_step_s(folder) or _serial_s(prepared)
    parts = explain_speedup(_as_measured(prepared.costs, folder), result.latency_s, serial_s)
    return _explanation(prepared.plan, parts, rank_changes(prepared), is_measured=True)


def _explanation(
    plan: Plan, parts: SpeedupBreakdown, tried: Sequence[Change] | None, *, is_measured: bool
) -> Explanation:
    best = tried[0] if tried and tried[0].gain >= _LEAST_GAIN else None
    num_tried = None if tried is None else len(tried)
    return Explanation(plan=plan, parts=parts, is_measured=is_measured, change=best, num_tried=num_tried)


def _serial_s(prepared: PreparedPlan) -> float | None:
    """The quickest step on one device; None: where other sizes are not known, the same micro-batches there."""
    if prepared.source is None:
        return None
    return fastest_baseline(prepared.plan, prepared.source, prepared.cluster, prepared.terms)[1].step_s


def baseline_step_s(folder: RunFolder) -> float | None:
    """A step of the serial run that this one is to be compared with, of those beside it; None where there is none."""
    found = serial_beside(folder)
    return None if found is None else found.latency_s


def _as_measured(costs: PlanCosts, folder: RunFolder) -> PlanCosts:
    """The stages' times as the run's events have them; where layers are shared they are left as forecast."""
    if costs.plan.mesh.tensor > 1 or costs.plan.shard:
        return costs
    taken: dict[tuple[int, str], list[float]] = {}
    for rank in range(costs.plan.mesh.num_workers):
        for event in folder.worker(rank).events():
            if event.get("kind") in _TIMED and event["note"] != "loss":
                seconds = event["end_s"] - event["start_s"]
                taken.setdefault((event["stage"], event["kind"]), []).append(seconds)
    stages = []
    for index in range(len(costs.stages)):
        seconds = {kind: statistics.median(taken[index, kind]) for kind in _TIMED if (index, kind) in taken}
        if "forward" not in seconds:
            return costs
        stages.append(_stage_as_measured(costs, index, seconds))
    return replace(costs, stages=tuple(stages))


def _stage_as_measured(costs: PlanCosts, index: int, seconds: Mapping[str, float]) -> StageCosts:
    """A stage with what its actions took, by their kind."""
    stage, terms = costs.stages[index], costs.model_overheads
    forward = seconds["forward"]
    changed: dict[str, Any] = {"forward_s": forward}
    loss = terms.loss_backward_s * costs.contention if index == len(costs.stages) - 1 else 0.0
    halves = [seconds.get(kind) for kind in _HALVES]
    if None not in halves and index > 0 and not costs.recomputes(index):
        first, second = (one or 0.0 for one in halves)
        changed["backward_input_s"] = max(0.0, first - loss) / terms.split_input
        changed["backward_weight_s"] = max(0.0, second - stage.accumulate_s) / terms.split_weight
    elif "backward" in seconds or any(one is not None for one in halves):
        # The first stage has all of it in the second half, one that runs forward again in the first.
        whole = seconds.get("backward", sum(one or 0.0 for one in halves))
        again = forward if costs.recomputes(index) else 0.0
        rest = max(0.0, whole - again - loss - stage.accumulate_s)
        share = stage.backward_input_s / max(1e-12, stage.backward_input_s + stage.backward_weight_s)
        changed |= {"backward_input_s": share * rest, "backward_weight_s": (1 - share) * rest}
    return replace(stage, **changed)


def rank_changes(prepared: PreparedPlan) -> list[Change]:
    """The changes that can be made and fit, the one that gains most first: that one by a measurement of its size."""
    now_s = step_seconds(prepared.costs)
    plans = dict(_changes(prepared))
    found: dict[str, Change] = {}
    again = list(plans)
    while True:
        for what in again:
            found.pop(what, None)
            step_s = _step_if_fits(prepared, plans[what])
            if step_s is not None:
                found[what] = Change(what=what, step_s=step_s, gain=now_s / step_s - 1)
        ranked = sorted(found.values(), key=lambda one: -one.gain)
        if prepared.source is None or not ranked or ranked[0].gain < _LEAST_GAIN:
            return ranked
        size = profiled_size(plans[ranked[0].what])
        if size == profiled_size(prepared.plan) or not prepared.source.measure_size(*size):
            return ranked
        again = [what for what, plan in plans.items() if profiled_size(plan) == size]


def _step_if_fits(prepared: PreparedPlan, plan: Plan) -> float | None:
    """A plan's step by what is known; None where it is refused or does not fit."""
    try:
        forecast = predict(prepared.changed(plan=plan, sharp=False).costs, timeline=False)
    except UsageError:
        return None
    return forecast.step_s if forecast.fits else None


def _changes(prepared: PreparedPlan) -> Iterator[tuple[str, Plan]]:
    plan, names = prepared.plan, [unit.name for unit in prepared.measured.profile.units]
    least = min(2, *plan_microbatch_sizes(plan))  # samples of a micro-batch: with one not every model can be trained
    for at, cut in enumerate(plan.cuts):
        place = names.index(cut)
        for moved in (place - 1, place + 1):
            inside = (names.index(plan.cuts[at - 1]) if at else -1) < moved
            inside &= moved < (names.index(plan.cuts[at + 1]) if at + 1 < len(plan.cuts) else len(names) - 1)
            if inside:
                cuts = (*plan.cuts[:at], names[moved], *plan.cuts[at + 1 :])
                yield f"cut after {names[moved]} instead of {cut}", replace(plan, cuts=cuts)
    for chunks in (plan.microbatches * 2, plan.microbatches // 2):
        if 1 <= chunks <= plan.batch // (least * plan.mesh.data):
            yield f"{chunks} micro-batches instead of {plan.microbatches}", replace(plan, microbatches=chunks)
    if plan.mesh.pipeline > 1 and plan.training:
        for name in SCHEDULES:
            other = replace(plan, schedule=name, stages=None, cuts=(), placement="auto")  # type: ignore[arg-type]
            if name != plan.schedule and other.num_stages <= len(names):
                yield f"schedule {name} instead of {plan.schedule}", other
    if plan.recompute != "none":
        yield "no recomputation", replace(plan, recompute="none")
    data, tensor, pipeline = plan.mesh.data, plan.mesh.tensor, plan.mesh.pipeline
    for mesh in dict.fromkeys((Mesh(data=data * pipeline, tensor=tensor), Mesh(data=plan.mesh.num_workers))):
        if mesh != plan.mesh and plan.batch >= least * mesh.data:
            other = replace(baseline_plan(plan, mesh, 1), recompute=plan.recompute, shard=plan.shard)
            yield f"{mesh} instead of {plan.mesh}", other
    stages = max(data, tensor)
    chunks = 2 * stages * plan.microbatches
    if pipeline == 1 and stages > 1 and chunks * least <= plan.batch and plan.mesh.num_workers == stages:
        mesh = Mesh(pipeline=stages)
        other = replace(baseline_plan(plan, mesh, chunks), recompute=plan.recompute)
        yield f"{mesh} in {chunks} micro-batches instead of {plan.mesh}", other
