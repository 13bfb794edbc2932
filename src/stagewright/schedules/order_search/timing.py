"""The times of an order's actions, its step, and its critical path."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from stagewright.schedules.order_search.kinds import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from stagewright.schedules.order_search.problem import Order, OrderProblem

_UNKNOWN = -1.0


@dataclass(slots=True)
class OrderTimes:
    """Times of an order."""

    step_s: float
    """End of the step; infinite if the order deadlocks."""
    total_s: float
    """Sum of the workers' ends, by which orders of equal length are compared."""
    start_s: list[float]
    """Start of every action, by its number."""

    @property
    def key(self) -> tuple[float, float]:
        """What is smaller for a better order."""
        return self.step_s, self.total_s


class OrderTimer:
    """Times orders of one problem."""

    def __init__(self, problem: OrderProblem) -> None:
        self.problem = problem
        self.num_timed = 0
        count, pairs = problem.num_microbatches, problem.num_pairs
        workers, last = problem.stage_workers, problem.num_stages - 1
        numbers = problem.edges()
        # For each pair: the edge and the time of its forward transfer, and of its backward one; no edge: same worker.
        self._forward: list[tuple[int, float]] = []
        self._backward: list[tuple[int, float]] = []
        for pair in range(pairs):
            stage, microbatch = divmod(pair, count)
            remote = stage < last and workers[stage] != workers[stage + 1]
            self._forward.append((numbers[stage], problem.link_s[stage][microbatch]) if remote else (-1, 0.0))
            remote = stage > 0 and workers[stage] != workers[stage - 1]
            link = problem.link_s[stage - 1][microbatch] if remote else 0.0
            self._backward.append((numbers[last + stage - 1], link) if remote else (-1, 0.0))
        self._num_edges = max(numbers, default=0) + 1

    def time(self, order: Order) -> OrderTimes:
        """Compute the start of every action and the end of the step."""
        problem = self.problem
        self.num_timed += 1
        pairs, count, workers = problem.num_pairs, problem.num_microbatches, problem.stage_workers
        durations, first_of_last = problem.duration_s, pairs - count
        # When the inputs of each pair's forward and backward arrive.
        arrived = [0.0] * count + [_UNKNOWN] * (2 * pairs - count)
        start_s = [_UNKNOWN] * (4 * pairs)
        edge_free = [0.0] * self._num_edges
        free, position = [0.0] * len(order), [0] * len(order)
        waiting = list(range(len(order) - 1, -1, -1))
        while waiting:
            worker = waiting.pop()
            line, index, now = order[worker], position[worker], free[worker]
            while index < len(line):
                number = line[index]
                kind, pair = divmod(number, pairs)
                if kind != BACKWARD_WEIGHT:
                    ready = arrived[pair] if kind == FORWARD else arrived[pairs + pair]
                    if ready < 0.0:
                        break
                    now = max(now, ready)
                start_s[number] = now
                now += durations[number]
                index += 1
                if kind == BACKWARD_WEIGHT:
                    continue
                if kind == FORWARD:
                    if pair >= first_of_last:
                        arrived[pairs + pair] = now
                        continue
                    target, (edge, seconds) = pair + count, self._forward[pair]
                elif pair >= count:
                    target, (edge, seconds) = pairs + pair - count, self._backward[pair]
                else:
                    continue
                if edge < 0:
                    arrived[target] = now
                    continue
                arrived[target] = edge_free[edge] = max(now, edge_free[edge]) + seconds
                waiting.append(workers[target % pairs // count])
            position[worker], free[worker] = index, now
        if any(index < len(line) for index, line in zip(position, order, strict=True)):
            return OrderTimes(math.inf, math.inf, start_s)
        ends = [end + tail for end, tail in zip(free, problem.tail_s, strict=True)]
        return OrderTimes(max(ends), sum(ends), start_s)

    def critical_path(self, order: Order, times: OrderTimes) -> list[int]:
        """Return the actions that determine the step, the last one first."""
        problem, start_s = self.problem, times.start_s
        pairs, count = problem.num_pairs, problem.num_microbatches
        previous = {after: before for line in order for before, after in itertools.pairwise(line)}
        ends = {
            line[-1]: start_s[line[-1]] + problem.duration_s[line[-1]] + tail
            for line, tail in zip(order, problem.tail_s, strict=True)
            if line
        }
        number: int | None = max(ends, key=lambda one: ends[one])
        path: list[int] = []
        while number is not None:
            path.append(number)
            before = previous.get(number)
            if before is not None and start_s[before] + problem.duration_s[before] >= start_s[number] - 1e-12:
                number = before
                continue
            kind, pair = divmod(number, pairs)
            number = None
            if kind == FORWARD and pair >= count:
                number = pair - count
            elif kind in (BACKWARD, BACKWARD_INPUT):
                later = pair + count
                sources = [BACKWARD * pairs + later, BACKWARD_INPUT * pairs + later] if later < pairs else [pair]
                number = next((source for source in sources if start_s[source] >= 0.0), None)
            number = before if number is None else number
        return path
