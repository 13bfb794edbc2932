"""The order of actions of plans with schedule "searched", before they run on this machine."""

from __future__ import annotations

from stagewright.api.forecast import Measuring, measure_plan
from stagewright.api.progress import Progress
from stagewright.errors import UsageError
from stagewright.spec.plan import Plan
from stagewright.spec.plan_rules import check_plan
from stagewright.spec.searched_order import lacks_order


def search_order(plan: Plan, progress: Progress) -> Plan:
    """Measure the model and search the plan's order, if it has none; a plan that would be refused stays as it is."""
    if not lacks_order(plan):
        return plan
    try:
        check_plan(plan)
    except UsageError:
        return plan
    progress.note(f"{plan.mesh.strategy}: measuring, and searching the order of actions …")
    return measure_plan(plan, None, Measuring(), progress).plan
