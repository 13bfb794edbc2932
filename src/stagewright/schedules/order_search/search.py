"""The search for the order of actions with the shortest step under a memory limit.

    built-in orders ─┐
    list scheduling ─┴─► keep those that fit ─► improve the best along their critical paths ─► the best few
                                                small pipelines: branch and bound over all orders

Nothing is random and nothing depends on the clock: equal problems give equal orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagewright.schedules.action_order import Actions
from stagewright.schedules.order_search.exact import MAX_PAIRS, ExactSearch
from stagewright.schedules.order_search.improve import improve
from stagewright.schedules.order_search.list_schedule import list_schedule, rules
from stagewright.schedules.order_search.problem import Order, OrderProblem
from stagewright.schedules.order_search.timing import OrderTimer, OrderTimes

MAX_TIMED_ACTIONS = 1_000_000
"""Actions of all orders that the local search times: about a second and a half."""
_MAX_NODES = 20_000
_NUM_STARTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundOrder:
    """An order with its step."""

    actions: Actions
    step_s: float


def search_orders(
    problem: OrderProblem, candidates: Sequence[Actions] = (), *, max_timed_actions: int = MAX_TIMED_ACTIONS
) -> list[FoundOrder]:
    """Return the best orders found that fit, the best first; empty if none fits.

    ``candidates``: other orders to start from; none that fits is better than the first one returned.
    """
    timer = OrderTimer(problem)
    pool: dict[Order, OrderTimes] = {}
    listed = (list_schedule(problem, rule) for rule in rules(problem.num_microbatches))
    for order in (*map(problem.encode, candidates), *(order for order in listed if order is not None)):
        if order not in pool and problem.fits(order):
            pool[order] = timer.time(order)
    min_s, starts = problem.min_step_s(), sorted(pool, key=lambda order: pool[order].key)[:_NUM_STARTS]
    num_orders = max_timed_actions // (3 * problem.num_pairs * max(1, len(starts)))
    for order in starts:
        improved, times = improve(timer, order, num_orders, min_s)
        pool[improved] = times
    if problem.num_pairs <= MAX_PAIRS:
        step_s = min((times.step_s for times in pool.values()), default=float("inf"))
        best = ExactSearch(problem, step_s, _MAX_NODES).run()
        if best is not None:
            pool[best] = timer.time(best)
    ranked = sorted(pool, key=lambda order: pool[order].key)
    return [FoundOrder(actions=problem.decode(order), step_s=pool[order].step_s) for order in ranked[:_NUM_STARTS]]
