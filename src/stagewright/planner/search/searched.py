"""Plans of schedule "searched": an order of actions for each of the most promising ones, beside the fixed schedules."""

from __future__ import annotations

from dataclasses import replace

from stagewright.planner.search.candidates import CandidateBuilder
from stagewright.planner.search.result import Candidate, RankedPlan, SearchResult, memory_needed
from stagewright.schedules.action_order import SEARCHED
from stagewright.spec.plan import Plan

_MAX_SEARCHED = 12


def rank_searched(
    builder: CandidateBuilder,
    candidates: list[Candidate],
    result: SearchResult,
    max_ranked: int,
    min_s: dict[str, float],
) -> None:
    """Search the orders of candidates in the order of their bounds, as long as one can be among the best."""
    candidates.sort(key=lambda candidate: candidate.bound_s)
    for candidate in candidates[:_MAX_SEARCHED]:
        if len(result.best) >= max_ranked and candidate.bound_s >= result.best[-1].forecast.step_s:
            break
        ranked = builder.rank(candidate)
        strategy = ranked.plan.mesh.strategy
        result.num_exact += 1
        if not ranked.forecast.fits:
            result.num_unfit += 1
            builder.unfit.setdefault(strategy, f"does not fit: {memory_needed(ranked.forecast)}")
            continue
        # Of several numbers of stages and placements only the best is shown.
        best = {_open_plan(plan.plan): plan for plan in sorted([*result.best, ranked], key=_step_s, reverse=True)}
        result.best = sorted(best.values(), key=_step_s)[:max_ranked]
        min_s[strategy] = min(ranked.forecast.step_s, min_s.get(strategy, float("inf")))


def _step_s(ranked: RankedPlan) -> float:
    return ranked.forecast.step_s


def _open_plan(plan: Plan) -> Plan:
    """Return the plan as it was before its stages and its order were chosen."""
    if plan.schedule != SEARCHED:
        return plan
    return replace(plan, stages=None, placement="auto", cuts=(), actions=())
