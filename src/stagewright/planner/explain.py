"""Why a plan's speed-up is not n, and the one change that would gain most.

A run is explained by its own events: the stages' times as they were measured there, the rest as forecast, and what is
then left as *unexplained*. Changes are tried one by one, each with a forecast of its own: a cut moved by a unit, other
numbers of micro-batches, another schedule, no recomputation, data instead of pipeline.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stagewright.errors import UsageError
from stagewright.forecast.costs import PlanCosts
from stagewright.forecast.predict import predict, step_seconds
from stagewright.forecast.what_if import Parts, explain_parts
from stagewright.plan.schedules import SCHEDULES
from stagewright.plan.value import Mesh, Plan
from stagewright.planner.forecasting import Prepared
from stagewright.store.run import RunFolder
from stagewright.store.serial import serial_beside

__all__ = ["Change", "Explanation", "best_change", "explain_plan", "explain_run", "serial_of"]

_LEAST_GAIN = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something that could be done otherwise."""

    # What, as a person would say it.
    what: str
    # The step's time then.
    step_s: float
    # How much more samples a second that is: 0.04 is 4 %.
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why the speed-up is not n."""

    # The parts.
    parts: Parts
    # Whether step_s was measured, or forecast.
    is_measured: bool
    # The change that would gain most; None: none of those tried gains a hundredth.
    change: Change | None

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
        }


def explain_plan(prepared: Prepared, *, changes: bool = True) -> Explanation:
    """A plan's forecast, explained; without `changes` none is looked for (costs that no plan has can't be compared)."""
    change = best_change(prepared) if changes else None
    return Explanation(parts=explain_parts(prepared.costs), is_measured=False, change=change)


def explain_run(prepared: Prepared, folder: RunFolder) -> Explanation:
    """A run, explained with the times of its own stages."""
    result = folder.result()
    if result is None or result.get("status") != "done" or "latency_s" not in result:
        raise UsageError(f"{folder.path} has no measured steps: explain a run that `stagewright compare` has finished")
    measured = replace(prepared, costs=_as_measured(prepared.costs, folder))
    parts = explain_parts(measured.costs, float(result["latency_s"]), serial_of(folder))
    return Explanation(parts=parts, is_measured=True, change=best_change(prepared))


def serial_of(folder: RunFolder) -> float | None:
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
            if event.get("kind") in ("forward", "backward") and event["note"] != "loss":
                seconds = event["end_s"] - event["start_s"]
                taken.setdefault((event["stage"], event["kind"]), []).append(seconds)
    stages = []
    last = len(costs.stages) - 1
    for index, stage in enumerate(costs.stages):
        forward = _typical(taken.get((index, "forward"), ()))
        if forward is None:
            return costs
        changed: dict[str, Any] = {"forward_s": forward}
        whole = _typical(taken.get((index, "backward"), ()))
        if whole is not None:
            again = forward if costs.recomputes(index) else 0.0
            loss = costs.model_terms.loss_backward_s * costs.crowded if index == last else 0.0
            rest = max(0.0, whole - again - loss - stage.accumulate_s)
            share = stage.backward_input_s / max(1e-12, stage.backward_input_s + stage.backward_weight_s)
            changed |= {"backward_input_s": share * rest, "backward_weight_s": (1 - share) * rest}
        stages.append(replace(stage, **changed))
    return replace(costs, stages=tuple(stages))


def _typical(seconds: Sequence[float]) -> float | None:
    return statistics.median(seconds) if seconds else None


def best_change(prepared: Prepared) -> Change | None:
    """The change that would gain most, of those that fit; None where none gains a hundredth."""
    now = step_seconds(prepared.costs)
    found: list[Change] = []
    for what, plan in _changes(prepared):
        try:
            other = prepared.changed(plan=plan)
        except UsageError:
            continue
        forecast = predict(other.costs)
        if forecast.fits:
            found.append(Change(what=what, step_s=forecast.step_s, gain=now / forecast.step_s - 1))
    best = max(found, key=lambda one: one.gain, default=None)
    return best if best is not None and best.gain >= _LEAST_GAIN else None


def _changes(prepared: Prepared) -> Iterator[tuple[str, Plan]]:
    plan, names = prepared.plan, [unit.name for unit in prepared.measured.profile.units]
    for at, cut in enumerate(plan.cuts):
        place = names.index(cut)
        for moved in (place - 1, place + 1):
            inside = (names.index(plan.cuts[at - 1]) if at else -1) < moved
            inside &= moved < (names.index(plan.cuts[at + 1]) if at + 1 < len(plan.cuts) else len(names) - 1)
            if inside:
                cuts = (*plan.cuts[:at], names[moved], *plan.cuts[at + 1 :])
                yield f"cut after {names[moved]} instead of {cut}", replace(plan, cuts=cuts)
    if plan.mesh.pipeline > 1:
        for chunks in (plan.microbatches * 2, plan.microbatches // 2):
            if 1 <= chunks <= plan.batch // plan.mesh.data:
                yield f"{chunks} micro-batches instead of {plan.microbatches}", replace(plan, microbatches=chunks)
        for name in SCHEDULES:
            if name != plan.schedule and plan.training:
                other = replace(plan, schedule=name, stages=None, cuts=(), placement="auto")  # type: ignore[arg-type]
                if other.num_stages <= len(names):
                    yield f"schedule {name} instead of {plan.schedule}", other
    if plan.recompute != "none":
        yield "no recomputation", replace(plan, recompute="none")
    count = plan.mesh.pipeline * plan.mesh.data
    if plan.mesh.pipeline > 1 and plan.batch >= count:
        yield (
            f"data={count} instead of {plan.mesh}",
            replace(
                plan,
                mesh=Mesh(data=count, tensor=plan.mesh.tensor),
                microbatches=1,
                stages=None,
                cuts=(),
                placement="auto",
                schedule="1f1b",
                codec="none",
                codec_backward=None,
            ),
        )
