"""Searched orders: valid, within memory, never worse than the built-in ones, and the best of all where few exist."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from math import inf

import pytest

from stagewright.errors import UsageError
from stagewright.schedules.action_check import check_actions
from stagewright.schedules.action_order import Actions, schedule_actions
from stagewright.schedules.order_search.problem import Order, OrderProblem
from stagewright.schedules.order_search.search import search_orders
from stagewright.schedules.order_search.timing import OrderTimer
from stagewright.schedules.rules import FIXED_SCHEDULES, PLACEMENTS, SCHEDULES, Placement

LAYOUTS: list[tuple[Placement, int]] = [("in-order", 1), ("in-order", 2), ("v", 2)]


def random_problem(
    workers: tuple[int, ...], count: int, seed: int, *, limit: float = inf, split_cost: float = 1.1
) -> OrderProblem:
    """Unequal stages, links and optimizer steps; micro-batch 0 is quicker, as without accumulation."""
    rng, num_workers = random.Random(seed), max(workers) + 1
    times = [[rng.uniform(0.5, 2.0) for _ in range(3)] for _ in workers]

    def table(values: list[float]) -> tuple[tuple[float, ...], ...]:
        return tuple((0.95 * value, *(value,) * (count - 1)) for value in values)

    return OrderProblem(
        stage_workers=workers,
        action_s=(
            table([forward for forward, _, _ in times]),
            table([inputs + weights for _, inputs, weights in times]),
            table([split_cost * inputs for _, inputs, _ in times]),
            table([split_cost * weights for _, _, weights in times]),
        ),
        link_s=table([rng.choice([0.0, 0.1, 0.4]) for _ in workers[1:]]),
        saved_bytes=((10,) * count,) * len(workers),
        pending_bytes=((2,) * count,) * len(workers),
        limit_bytes=(limit,) * num_workers,
        tail_s=tuple(rng.choice([0.0, 1.0]) for _ in range(num_workers)),
        can_split=(False, *(True for _ in workers[1:])),
    )


def built_in(placement: Placement, workers: tuple[int, ...], count: int) -> dict[str, Actions]:
    found = {}
    for name in FIXED_SCHEDULES:
        if SCHEDULES[name].placement == placement or name in ("gpipe", "1f1b"):
            try:
                found[name] = schedule_actions(name, workers, count)
            except UsageError:
                continue
    return found


def every_line(problem: OrderProblem, worker: int) -> list[tuple[int, ...]]:
    """Each order of a worker's actions in which micro-batches keep their order and memory suffices."""
    count, pairs = problem.num_microbatches, problem.num_pairs
    (stage,) = problem.stages_of(worker)

    def extend(
        line: tuple[int, ...], forwards: int, backwards: int, pending: tuple[int, ...]
    ) -> Iterator[tuple[int, ...]]:
        if problem.peak_bytes(line) > problem.limit_bytes[worker]:
            return
        if backwards == count and not pending:
            yield line
        pair = stage * count
        if forwards < count:
            yield from extend((*line, pair + forwards), forwards + 1, backwards, pending)
        if backwards < forwards:
            yield from extend((*line, pairs + pair + backwards), forwards, backwards + 1, pending)
            if problem.can_split[stage]:
                split = (*line, 2 * pairs + pair + backwards)
                yield from extend(split, forwards, backwards + 1, (*pending, pair + backwards))
        if pending:
            yield from extend((*line, 3 * pairs + pending[0]), forwards, backwards, pending[1:])

    return list(extend((), 0, 0, ()))


def best_of_all(problem: OrderProblem) -> float:
    """The shortest step of all orders, one by one."""
    timer = OrderTimer(problem)
    orders: Iterator[Order] = itertools.product(*(every_line(problem, worker) for worker in range(problem.num_workers)))
    return min(timer.time(order).step_s for order in orders)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize(("num_workers", "count"), [(2, 2), (2, 3), (3, 2)])
def test_small_pipelines_get_the_best_of_all_orders(num_workers: int, count: int, seed: int) -> None:
    limit = random.Random(seed).choice([12.0, 20.0, 24.0, inf])
    problem = random_problem(tuple(range(num_workers)), count, seed, limit=limit)
    (best, *_) = search_orders(problem)
    assert best.step_s == pytest.approx(best_of_all(problem))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("limit", [1.0, 1.5, inf])
@pytest.mark.parametrize(("placement", "each"), LAYOUTS)
@pytest.mark.parametrize(("num_workers", "count"), [(2, 5), (3, 6)])
def test_orders_are_valid_fit_and_are_not_worse_than_built_in_ones(
    num_workers: int, count: int, placement: Placement, each: int, limit: float, seed: int
) -> None:
    """Memory for as many micro-batches as 1F1B's first worker holds, for half as many more, and for all."""
    workers = PLACEMENTS[placement](num_workers * each, num_workers)
    problem = random_problem(workers, count, seed, limit=limit * 12 * num_workers * each)
    others = built_in(placement, workers, count)
    found = search_orders(problem, list(others.values()), max_timed_actions=60_000)
    assert found
    timer = OrderTimer(problem)
    for order in found:
        check_actions(order.actions, workers, count)
        encoded = problem.encode(order.actions)
        assert problem.decode(encoded) == order.actions
        assert problem.fits(encoded)
        assert timer.time(encoded).step_s == order.step_s >= problem.min_step_s() * (1 - 1e-9)
    steps = [timer.time(problem.encode(one)).step_s for one in others.values() if problem.fits(problem.encode(one))]
    assert found[0].step_s <= min(steps, default=inf)
    assert [order.step_s for order in found] == sorted(order.step_s for order in found)


def test_equal_problems_give_equal_orders() -> None:
    problems = [random_problem((0, 1, 2), 6, 7, limit=40.0) for _ in range(2)]
    first, second = (search_orders(problem, max_timed_actions=60_000) for problem in problems)
    assert first == second


@pytest.mark.parametrize("limit", [40.0, 60.0, inf])
def test_unequal_stages_beat_every_built_in_order(limit: float) -> None:
    """Four workers, eight micro-batches: a backward is split where another worker waits for it, and only there."""
    workers = (0, 1, 2, 3)
    problem = random_problem(workers, 8, 3, limit=limit * 1.2)
    timer = OrderTimer(problem)
    steps = {
        name: timer.time(problem.encode(order)).step_s
        for name, order in built_in("in-order", workers, 8).items()
        if problem.fits(problem.encode(order))
    }
    (best, *_) = search_orders(problem)
    assert best.step_s < 0.99 * min(steps.values())


def test_without_room_for_one_micro_batch_nothing_is_found() -> None:
    assert search_orders(random_problem((0, 1), 2, 0, limit=9.0)) == []


def test_splitting_that_costs_too_much_is_left_out() -> None:
    problem = random_problem((0, 1, 2), 6, 1, split_cost=5.0)
    (best, *_) = search_orders(problem)
    assert {action.kind.value for line in best.actions for action in line} == {"F", "B"}


def test_an_order_that_deadlocks_takes_for_ever() -> None:
    problem = random_problem((0, 1), 2, 0)
    first, second = schedule_actions("gpipe", (0, 1), 2)
    assert OrderTimer(problem).time(problem.encode((first[::-1], second))).step_s == inf
