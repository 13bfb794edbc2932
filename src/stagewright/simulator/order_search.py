"""The order of actions of schedule "searched", for the costs of a plan.

    costs ─► times, saved activations, limits ─► `schedules.order_search` ─► forecasts of the best orders ─► the best
                                                 and built-in orders        one exceeds its memory: lower the limits

Orders are compared by their forecasts, so none of the built-in schedules that fits the same stages is better. The
memory of a forecast has more than saved activations; the limits of the search are what remains for those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from stagewright.errors import UsageError
from stagewright.schedules.action_order import (
    SEARCHED,
    Action,
    Actions,
    Kind,
    format_actions,
    parse_actions,
    schedule_actions,
)
from stagewright.schedules.order_search.problem import OrderProblem, Table
from stagewright.schedules.order_search.search import MAX_TIMED_ACTIONS, search_orders
from stagewright.schedules.rules import FIXED_SCHEDULES, SCHEDULES
from stagewright.simulator.action_graph import FORWARD, build_graph
from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.forecast import Forecast
from stagewright.simulator.gradient_allreduce import predict_gradient_allreduce
from stagewright.simulator.simulate import optimizer_s, predict
from stagewright.simulator.step_times import pipeline_times
from stagewright.spec.plan import Plan

_MAX_ROUNDS = 3
_TOLERANCE = 1e-3  # steps that count as equal


def with_order(costs: PlanCosts, *, max_timed_actions: int = MAX_TIMED_ACTIONS) -> tuple[PlanCosts, Forecast]:
    """Return the costs with the best order found for their plan, and its forecast.

    If no order fits, the one that exceeds the memory least is returned.
    """
    plan = replace(costs.plan, schedule=SEARCHED)
    built_in = dict.fromkeys(format_actions(actions) for actions in _built_in_orders(plan))
    forecasts = {actions: _predict(costs, actions) for actions in built_in}
    least = min(forecasts, key=lambda actions: (_excess(forecasts[actions]), forecasts[actions].step_s))
    problem = order_problem(_ordered(costs, least), forecasts[least])
    candidates = [parse_actions(actions) for actions in built_in]
    few, effort = _with_few_in_flight(problem), max_timed_actions // 2
    candidates += [order.actions for order in search_orders(few, candidates, max_timed_actions=effort)]
    for _ in range(_MAX_ROUNDS):
        found = search_orders(problem, candidates, max_timed_actions=effort)
        orders = [*candidates, *(order.actions for order in found)]
        new = [actions for actions in map(format_actions, orders) if actions not in forecasts]
        forecasts |= {actions: _predict(costs, actions) for actions in new}
        excess = _worker_excess(forecasts[format_actions(found[0].actions)]) if found else [0]
        if max(excess) <= 0:
            break
        limits = zip(problem.limit_bytes, excess, strict=True)
        problem = replace(problem, limit_bytes=tuple(limit - max(0, more) for limit, more in limits))
    best = _choose(forecasts, list(built_in))
    return _ordered(costs, best), forecasts[best]


def _choose(forecasts: Mapping[tuple[str, ...], Forecast], built_in: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Choose the shortest step that fits; of nearly equal ones the least memory, but none worse than a built-in one."""
    excess = min(map(_excess, forecasts.values()))
    fitting = {actions: forecast for actions, forecast in forecasts.items() if _excess(forecast) == excess}
    limit_s = min(forecast.step_s for forecast in fitting.values()) * (1 + _TOLERANCE)
    limit_s = min([limit_s, *(fitting[actions].step_s for actions in built_in if actions in fitting)])
    equal = {actions: forecast for actions, forecast in fitting.items() if forecast.step_s <= limit_s}
    return min(equal, key=lambda actions: (equal[actions].peak_memory_bytes, equal[actions].step_s))


def _with_few_in_flight(problem: OrderProblem) -> OrderProblem:
    """Return the problem with memory for one micro-batch per worker on each stage, as the first worker of 1F1B needs.

    Memory is often free, and so are orders that waste it.
    """
    limits = [
        min(limit, problem.num_workers * sum(max(problem.saved_bytes[stage]) for stage in problem.stages_of(worker)))
        for worker, limit in enumerate(problem.limit_bytes)
    ]
    return replace(problem, limit_bytes=tuple(limits))


def order_problem(costs: PlanCosts, forecast: Forecast) -> OrderProblem:
    """Return the search problem of a plan, given some order of its actions and its forecast."""
    plan, workers, count = costs.plan, costs.plan.stage_workers, len(costs.shares)
    actions = parse_actions(plan.actions)
    times = pipeline_times(costs)
    tails = []
    for worker in range(plan.mesh.pipeline):
        allreduce = predict_gradient_allreduce(costs, times, worker)
        tail = allreduce.end_s - times.worker_end_s(worker) + optimizer_s(costs, worker)
        tails.append(max(0.0, tail) + costs.parameter_gather_s(worker))
    action_s, link_s = _durations(costs)
    saved, pending = _saved_bytes(costs)
    problem = OrderProblem(
        stage_workers=workers,
        action_s=action_s,
        link_s=link_s,
        saved_bytes=saved,
        pending_bytes=pending,
        limit_bytes=(math.inf,) * plan.mesh.pipeline,
        tail_s=tuple(tails),
        # The first stage has no input gradient, and a recomputed stage computes all gradients at once.
        can_split=tuple(stage > 0 and not costs.recomputes(stage) for stage in range(len(workers))),
    )
    assert all(len(row) == count for row in saved)
    limits = []
    for predicted, line in zip(forecast.workers, problem.encode(actions), strict=True):
        other = predicted.memory.peak_bytes - problem.peak_bytes(line)
        limits.append(math.inf if predicted.memory_limit_bytes is None else predicted.memory_limit_bytes - other)
    return replace(problem, limit_bytes=tuple(limits))


def _built_in_orders(plan: Plan) -> Iterator[Actions]:
    """Yield the orders of the other schedules for the stages of a plan."""
    workers, num_workers = plan.stage_workers, plan.mesh.pipeline
    for name in FIXED_SCHEDULES:
        rule = SCHEDULES[name]
        is_placed = rule.placement == plan.resolved_placement or name in ("gpipe", "1f1b")
        if not is_placed or (rule.placement == "v" and plan.num_stages != 2 * num_workers):
            continue
        if rule.rounds and plan.microbatches % num_workers:
            continue
        if name not in ("gpipe", "1f1b") and plan.microbatches < rule.min_microbatches(plan.num_stages, num_workers):
            continue
        try:
            yield schedule_actions(name, workers, plan.microbatches)
        except UsageError:
            continue


def _ordered(costs: PlanCosts, actions: tuple[str, ...]) -> PlanCosts:
    return replace(costs, plan=replace(costs.plan, schedule=SEARCHED, actions=actions))


def _predict(costs: PlanCosts, actions: tuple[str, ...]) -> Forecast:
    return predict(_ordered(costs, actions), costs.plan.cuts, timeline=False)


def _worker_excess(forecast: Forecast) -> list[int]:
    """Return by how much each worker exceeds its memory; negative below."""
    return [
        -1 if worker.memory_limit_bytes is None else worker.memory.peak_bytes - worker.memory_limit_bytes
        for worker in forecast.workers
    ]


def _excess(forecast: Forecast) -> int:
    return max(0, *_worker_excess(forecast))


def _durations(costs: PlanCosts) -> tuple[tuple[Table, Table, Table, Table], Table]:
    """Return the time of every kind of action on each stage, and of the transfers over each cut, by micro-batch."""
    workers, count = costs.plan.stage_workers, len(costs.shares)
    whole = schedule_actions("gpipe", workers, count)
    tables = [[[0.0] * count for _ in workers] for _ in range(4)]
    links = [[0.0] * count for _ in workers[1:]]
    for actions in (whole, tuple(tuple(_split(line)) for line in whole)):
        graph = build_graph(actions, workers)
        seconds = [float(sum(pair)) for pair in zip(*costs.node_times(graph), strict=True)]
        for node, value in enumerate(seconds):
            kind, stage, microbatch = int(graph.kind[node]), int(graph.stage[node]), int(graph.microbatch[node])
            if graph.is_p2p[node]:
                links[stage - (kind != FORWARD)][microbatch] = value
            else:
                tables[kind][stage][microbatch] = value
    forward, backward, inputs, weights = (tuple(map(tuple, table)) for table in tables)
    return (forward, backward, inputs, weights), tuple(map(tuple, links))


def _split(line: Sequence[Action]) -> Iterator[Action]:
    for action in line:
        if action.kind is Kind.FORWARD:
            yield action
        else:
            yield replace(action, kind=Kind.BACKWARD_INPUT)
            yield replace(action, kind=Kind.BACKWARD_WEIGHT)


def _saved_bytes(costs: PlanCosts) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return the activations that each stage saves of a micro-batch, and what it adds between I and W."""
    saved, pending = [], []
    for index, stage in enumerate(costs.stages):
        size = stage.recomputation.held_bytes if costs.recomputes(index) else stage.saved_bytes
        if index == len(costs.stages) - 1:
            size += costs.model_overheads.loss_kept_bytes
        if index == 0 and costs.batch_input_bytes:  # held with the whole batch
            size -= stage.input_bytes
        held = stage.saved_bytes * costs.model_overheads.split_held_share
        saved.append(tuple(int(share * size) for share in costs.shares))
        pending.append(tuple(int(share * held) for share in costs.shares))
    return tuple(saved), tuple(pending)
