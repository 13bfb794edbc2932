"""Plans of schedule "searched": their order of actions, which is searched for measured times and stored in the plan."""

from __future__ import annotations

from dataclasses import replace

from stagewright.errors import UsageError
from stagewright.schedules.action_check import check_actions
from stagewright.schedules.action_order import SEARCHED, parse_actions
from stagewright.schedules.rules import SCHEDULES, Placement
from stagewright.spec.plan import Plan


def lacks_order(plan: Plan) -> bool:
    """Whether a plan can't run before its order is searched."""
    return plan.schedule == SEARCHED and plan.training and plan.mesh.pipeline > 1 and not plan.actions


def require_order(plan: Plan) -> None:
    """Raise UsageError if the order of a plan is still to be searched."""
    if lacks_order(plan):
        raise UsageError(
            'schedule = "searched" needs actions, which are searched for measured times: write the plan with '
            f'`stagewright plan {plan.model.name} --schedules searched -o plan.toml`, or use schedule = "1f1b"'
        )


def check_order(plan: Plan) -> None:
    """Raise UsageError if the order of a plan does not suit its schedule, stages or micro-batches."""
    if not plan.actions:
        return
    if plan.schedule != SEARCHED:
        raise UsageError(
            f'actions are the order of schedule = "searched", and the plan has schedule = "{plan.schedule}": leave out '
            'actions, or use schedule = "searched"'
        )
    if plan.mesh.pipeline > 1:
        check_actions(parse_actions(plan.actions), plan.stage_workers, plan.microbatches)


def layouts(plan: Plan, num_units: int) -> list[Plan]:
    """Return the plan with each number of stages and placement that it leaves open, for a search of its order.

    Workers hold one stage, or two: in order, or as a V.
    """
    size = plan.mesh.pipeline
    counts = [plan.num_stages] if plan.cuts or plan.stages is not None else [size, 2 * size]
    placements: list[Placement] = ["in-order", "v"] if plan.placement == "auto" else [plan.resolved_placement]
    return [
        replace(plan, stages=count, placement=placement)
        for count in counts
        for placement in placements
        if count <= num_units and (placement != "v" or count > size or len(placements) == 1)
    ]


def splits_backward(plan: Plan, worker: int) -> bool:
    """Whether a pipeline worker splits backward into input-gradient and weight-gradient halves."""
    if plan.schedule == SEARCHED and plan.actions:
        return any("I" in action for action in plan.actions[worker].split())
    return SCHEDULES[plan.schedule].splits_backward
