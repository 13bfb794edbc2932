"""Why a plan's speed-up is below the number of devices, and the single change that would gain most.

A run is explained with its measured stage times and the engine overhead of its trace, the same number as in the
breakdown of its step; everything else is forecast, and the rest is *unexplained*. The baseline is the run's measured
one, or else the fastest single-device plan, as in a search.

Each possible change is forecast separately: a cut moved by one unit, another number of micro-batches, another schedule,
no recomputation, data instead of pipeline or tensor parallelism, pipeline instead of data. Costs of other micro-batch
sizes are interpolated; the best change's size is then measured, until the best change is a measured one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stagewright.display import Displayed
from stagewright.errors import UsageError
from stagewright.planner.baseline import baseline_plan, fastest_baseline
from stagewright.planner.costs.measure import plan_microbatch_sizes
from stagewright.planner.costs.source import measure_plan_size
from stagewright.planner.forecast import PreparedPlan, profiled_size
from stagewright.runs.baseline import find_baseline
from stagewright.runs.run_folder import RunFolder
from stagewright.schedules.rules import FIXED_SCHEDULES
from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.costs.stage_costs import StageCosts
from stagewright.simulator.simulate import predict, step_seconds
from stagewright.simulator.what_if import SpeedupBreakdown, explain_speedup, with_measured_overhead
from stagewright.spec.plan import Mesh, Plan
from stagewright.trace.breakdown import breakdown, mean_parts
from stagewright.trace.read import read_trace

_MIN_GAIN = 0.01
_HALVES = ("backward-input", "backward-weight")
_TIMED = ("forward", "backward", *_HALVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A possible change of the plan."""

    what: str
    """Description, like "8 micro-batches instead of 4"."""
    step_s: float
    """Forecast step time with it."""
    gain: float
    """Relative gain in throughput: 0.04 is 4 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Displayed):
    """Why the speed-up is not n."""

    plan: Plan
    parts: SpeedupBreakdown
    is_measured: bool
    """Whether the step time was measured, or forecast."""
    change: Change | None
    """The change that would gain most; None if none gains 1 %."""
    num_tried: int | None = None
    """Changes that were simulated and fit; None if none were searched."""

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
            **{name: getattr(parts, name) for name in ("num_devices", "serial_s", "ideal_s", "step_s", "speedup")},
            "is_measured": self.is_measured,
            "parts": [
                {"name": loss.name, "seconds": loss.seconds, "lost_speedup": lost[loss.name]} for loss in parts.parts
            ],
            "change": None if self.change is None else asdict(self.change),
            "num_tried": self.num_tried or 0,
        }


def explain_plan(prepared: PreparedPlan, *, changes: bool = True) -> Explanation:
    """Explain a plan's forecast; without `changes` no change is searched, for costs that belong to no real plan."""
    parts = explain_speedup(prepared.costs, serial_s=_serial_s(prepared))
    return _explanation(prepared.plan, parts, rank_changes(prepared) if changes else None, is_measured=False)


def explain_run(prepared: PreparedPlan, folder: RunFolder) -> Explanation:
    """Explain a run with its measured stage times."""
    result = folder.result()
    if result is None or not result.is_timed:
        raise UsageError(f"{folder.path} has no measured steps: explain a run that `stagewright compare` has finished")
    serial_s = baseline_step_s(folder) or _serial_s(prepared)
    parts = explain_speedup(_as_measured(prepared.costs, folder), result.latency_s, serial_s)
    overhead_s = _measured_overhead_s(folder)
    if overhead_s is not None:
        parts = with_measured_overhead(parts, overhead_s)
    return _explanation(prepared.plan, parts, rank_changes(prepared), is_measured=True)


def _explanation(
    plan: Plan, parts: SpeedupBreakdown, changes: Sequence[Change] | None, *, is_measured: bool
) -> Explanation:
    best = changes[0] if changes and changes[0].gain >= _MIN_GAIN else None
    num_tried = None if changes is None else len(changes)
    return Explanation(plan=plan, parts=parts, is_measured=is_measured, change=best, num_tried=num_tried)


def _serial_s(prepared: PreparedPlan) -> float | None:
    """Predict the fastest baseline step; None if costs of other sizes are unknown: use the same micro-batches."""
    if prepared.source is None:
        return None
    return fastest_baseline(prepared.plan, prepared.source, prepared.cluster, prepared.overheads)[1].step_s


def baseline_step_s(folder: RunFolder) -> float | None:
    """Return the step time of the run's baseline run in the same parent folder; None if there is none."""
    baseline = find_baseline(folder)
    return None if baseline is None else baseline.latency_s


def _measured_overhead_s(folder: RunFolder) -> float | None:
    """Return the engine overhead per batch, mean over the workers, from the run's trace; None without events."""
    try:
        trace = read_trace(folder)
    except UsageError:
        return None
    plan = folder.plan()
    num_batches = 1 if plan.training else plan.steps
    return mean_parts(breakdown(trace, trace.median_step), num_batches)["overhead"]


def _as_measured(costs: PlanCosts, folder: RunFolder) -> PlanCosts:
    """Replace stage times with those of the run's events; with tensor parallelism or FSDP keep the forecast."""
    if costs.plan.mesh.tensor > 1 or costs.plan.shard:
        return costs
    durations: dict[tuple[int, str], list[float]] = {}
    for rank in range(costs.plan.mesh.num_workers):
        for event in folder.worker(rank).events():
            if event.get("kind") in _TIMED and event["note"] != "loss":
                seconds = event["end_s"] - event["start_s"]
                durations.setdefault((event["stage"], event["kind"]), []).append(seconds)
    stages = []
    for index in range(len(costs.stages)):
        seconds = {kind: statistics.median(durations[index, kind]) for kind in _TIMED if (index, kind) in durations}
        if "forward" not in seconds:
            return costs
        stages.append(_stage_as_measured(costs, index, seconds))
    return replace(costs, stages=tuple(stages))


def _stage_as_measured(costs: PlanCosts, index: int, seconds: Mapping[str, float]) -> StageCosts:
    """Return a stage with the measured seconds of each kind of action."""
    stage, overheads = costs.stages[index], costs.model_overheads
    forward = seconds["forward"]
    changed: dict[str, Any] = {"forward_s": forward}
    loss = overheads.loss_backward_s * costs.contention if index == len(costs.stages) - 1 else 0.0
    halves = [seconds.get(kind) for kind in _HALVES]
    if None not in halves and index > 0 and not costs.recomputes(index):
        first, second = (half or 0.0 for half in halves)
        changed["backward_input_s"] = max(0.0, first - loss) / overheads.split_input
        changed["backward_weight_s"] = max(0.0, second - stage.accumulate_s) / overheads.split_weight
    elif "backward" in seconds or any(half is not None for half in halves):
        # The first stage runs all of it in the second half, a recomputed stage in the first.
        whole = seconds.get("backward", sum(half or 0.0 for half in halves))
        recompute = forward * stage.recomputation.forward_share if costs.recomputes(index) else 0.0
        rest = max(0.0, whole - recompute - loss - stage.accumulate_s)
        share = stage.backward_input_s / max(1e-12, stage.backward_input_s + stage.backward_weight_s)
        changed |= {"backward_input_s": share * rest, "backward_weight_s": (1 - share) * rest}
    return replace(stage, **changed)


def rank_changes(prepared: PreparedPlan) -> list[Change]:
    """Return the possible changes that fit, the largest gain first; the first one uses a measurement of its size."""
    now_s = step_seconds(prepared.costs)
    plans = dict(_changes(prepared))
    changes: dict[str, Change] = {}
    outdated = list(plans)
    while True:
        for what in outdated:
            changes.pop(what, None)
            step_s = _step_if_fits(prepared, plans[what])
            if step_s is not None:
                changes[what] = Change(what=what, step_s=step_s, gain=now_s / step_s - 1)
        ranked = sorted(changes.values(), key=lambda change: -change.gain)
        if prepared.source is None or not ranked or ranked[0].gain < _MIN_GAIN:
            return ranked
        size = profiled_size(plans[ranked[0].what])
        best = plans[ranked[0].what]
        if size == profiled_size(prepared.plan) or not measure_plan_size(prepared.source, best):
            return ranked
        outdated = [what for what, plan in plans.items() if profiled_size(plan) == size]


def _step_if_fits(prepared: PreparedPlan, plan: Plan) -> float | None:
    """Predict a plan's step without new measurements; None if it is invalid or does not fit."""
    try:
        forecast = predict(prepared.changed(plan=plan, measure=False).costs, timeline=False)
    except UsageError:
        return None
    return forecast.step_s if forecast.fits else None


def _changes(prepared: PreparedPlan) -> Iterator[tuple[str, Plan]]:
    plan, names = prepared.plan, [unit.name for unit in prepared.measured.profile.units]
    min_samples = min(2, *plan_microbatch_sizes(plan))  # not every model can train on single samples
    yield from _moved_cuts(plan, names)
    for count in (plan.microbatches * 2, plan.microbatches // 2):
        if 1 <= count <= plan.batch // (min_samples * plan.mesh.data):
            changed = replace(plan, microbatches=count, actions=())
            yield f"{count} micro-batches instead of {plan.microbatches}", changed
    if plan.mesh.pipeline > 1 and plan.training:
        for name in FIXED_SCHEDULES:
            changed = replace(plan, schedule=name, actions=(), stages=None, cuts=(), placement="auto")  # type: ignore[arg-type]
            if name != plan.schedule and changed.num_stages <= len(names):
                yield f"schedule {name} instead of {plan.schedule}", changed
    if plan.recompute != "none":
        yield "no recomputation", replace(plan, recompute="none")
    yield from _other_meshes(plan, min_samples)


def _moved_cuts(plan: Plan, names: list[str]) -> Iterator[tuple[str, Plan]]:
    for index, cut in enumerate(plan.cuts):
        position = names.index(cut)
        low = names.index(plan.cuts[index - 1]) if index else -1
        high = names.index(plan.cuts[index + 1]) if index + 1 < len(plan.cuts) else len(names) - 1
        for moved in (position - 1, position + 1):
            if low < moved < high:
                cuts = (*plan.cuts[:index], names[moved], *plan.cuts[index + 1 :])
                yield f"cut after {names[moved]} instead of {cut}", replace(plan, cuts=cuts)


def _other_meshes(plan: Plan, min_samples: int) -> Iterator[tuple[str, Plan]]:
    data, tensor, pipeline = plan.mesh.data, plan.mesh.tensor, plan.mesh.pipeline
    for mesh in dict.fromkeys((Mesh(data=data * pipeline, tensor=tensor), Mesh(data=plan.mesh.num_workers))):
        if mesh != plan.mesh and mesh.num_workers == plan.mesh.num_workers and plan.batch >= min_samples * mesh.data:
            changed = replace(baseline_plan(plan, mesh, 1), recompute=plan.recompute, shard=plan.shard, zero=plan.zero)
            yield f"{mesh} instead of {plan.mesh}", changed
    stages = max(data, tensor)
    count = 2 * stages * plan.microbatches
    if pipeline == 1 and stages > 1 and count * min_samples <= plan.batch and plan.mesh.num_workers == stages:
        mesh = Mesh(pipeline=stages)
        changed = replace(baseline_plan(plan, mesh, count), recompute=plan.recompute)
        yield f"{mesh} in {count} micro-batches instead of {plan.mesh}", changed
