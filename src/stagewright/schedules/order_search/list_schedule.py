"""List scheduling: build an order action by action, each time on the worker that can start first.

    a backward is ready       run it; split into I and W by the rule's `split`
    a forward is ready        run it, if memory and the rule's `max_in_flight` allow
    W waits                   run it where nothing else is ready for that long, or where memory is full
    nothing is ready          the worker idles until the next input arrives

A rule is a choice of priorities. No rule is the best for all times and limits, so the search tries many.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stagewright.schedules.order_search.kinds import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from stagewright.schedules.order_search.problem import Order, OrderProblem

Split: TypeAlias = Literal["never", "if-awaited", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Priorities of list scheduling."""

    extra_in_flight: int
    """Micro-batches in flight on a stage beyond 1F1B's, which has as many as there are stages from it to the last."""
    split: Split
    """When a backward is split: never, if the worker that needs its input gradient would wait for it, or always."""
    fill: float
    """W runs before an action that is not ready yet if its time is at most `fill` times the wait."""
    forward_first: bool = False
    """Whether forwards come before backwards where both are ready."""
    deep_first: bool = True
    """Whether a worker with several stages prefers forwards of its later stages."""


def rules(num_microbatches: int) -> Iterator[Rule]:
    """Yield the rules to try, for a number of micro-batches."""
    splits: tuple[Split, ...] = ("never", "if-awaited", "always")
    extras = [extra for extra in (0, 1, 2, 4) if extra < num_microbatches] + [num_microbatches]
    for split, extra, fill, deep, forward in itertools.product(
        splits, extras, (1.0, 0.0, 2.0), (True, False), (False, True)
    ):
        if split != "never" or fill == 1.0:  # without W there is nothing to fill
            yield Rule(extra_in_flight=extra, split=split, fill=fill, forward_first=forward, deep_first=deep)


def list_schedule(problem: OrderProblem, rule: Rule) -> Order | None:
    """Build the order of a rule; None if it gets stuck because memory is full."""
    return _Builder(problem, rule).build()


class _Builder:
    def __init__(self, problem: OrderProblem, rule: Rule) -> None:
        self.problem, self.rule = problem, rule
        self.count, self.pairs = problem.num_microbatches, problem.num_pairs
        self.stages = [problem.stages_of(worker) for worker in range(problem.num_workers)]
        self.forwards, self.backwards = [0] * problem.num_stages, [0] * problem.num_stages
        self.freed = [0] * problem.num_stages
        self.weights: list[deque[int]] = [deque() for _ in self.stages]
        self.arrived: dict[int, float] = {FORWARD * self.pairs + index: 0.0 for index in range(self.count)}
        self.free, self.held = [0.0] * len(self.stages), [0] * len(self.stages)
        numbers = problem.edges()
        self.edges, self.edge_free = numbers, [0.0] * (max(numbers, default=0) + 1)
        self.lines: list[list[int]] = [[] for _ in self.stages]
        # Room that a forward leaves for its micro-batch on later stages of its worker, lest all wait for memory.
        self.reserved = [
            sum(max(problem.saved_bytes[later]) for later in problem.stages_of(worker) if later > stage)
            for stage, worker in enumerate(problem.stage_workers)
        ]
        self.max_in_flight = [problem.num_stages - stage + rule.extra_in_flight for stage in range(problem.num_stages)]

    def build(self) -> Order | None:
        choices = [self._choose(worker) for worker in range(len(self.stages))]
        while True:
            ready = [(choice[0], worker) for worker, choice in enumerate(choices) if choice is not None]
            if not ready:
                break
            _, worker = min(ready)
            choice = choices[worker]
            assert choice is not None
            changed = self._run(worker, *choice)
            for other in changed:
                choices[other] = self._choose(other)
        is_done = all(count == self.count for count in self.freed)
        return tuple(map(tuple, self.lines)) if is_done else None

    def _choose(self, worker: int) -> tuple[float, int] | None:
        """Return the start and the number of the worker's next action; None if it has none."""
        now, held, problem = self.free[worker], self.held[worker], self.problem
        limit, changes = problem.limit_bytes[worker], problem.change_bytes
        startable: list[tuple[float, int, int, int]] = []
        for position, stage in enumerate(self.stages[worker]):
            pair = stage * self.count
            number = pair + self.backwards[stage]
            arrival = self.arrived.get(BACKWARD * self.pairs + number)
            if arrival is not None and self.backwards[stage] < self.count:
                startable.append(
                    (max(now, arrival), int(self.rule.forward_first), position, BACKWARD * self.pairs + number)
                )
            number = pair + self.forwards[stage]
            in_flight = self.forwards[stage] - self.freed[stage]
            if self.forwards[stage] < self.count and in_flight < self.max_in_flight[stage]:
                arrival = self.arrived.get(number)
                if arrival is not None and held + changes[number] + self.reserved[stage] <= limit:
                    rank = -position if self.rule.deep_first else position
                    startable.append((max(now, arrival), int(not self.rule.forward_first), rank, number))
        best = min(startable, default=None)
        if not self.weights[worker]:
            return None if best is None else (best[0], best[3])
        weight = self.weights[worker][0]
        if best is None or (best[0] - now) * self.rule.fill > problem.duration_s[weight]:
            return now, weight
        if best[0] > now and self.rule.fill > 0 and (best[0] - now) * self.rule.fill == problem.duration_s[weight]:
            return now, weight
        return best[0], best[3]

    def _run(self, worker: int, start: float, number: int) -> list[int]:
        """Run an action; return the workers whose choice may change."""
        problem, (kind, pair) = self.problem, divmod(number, self.pairs)
        stage = pair // self.count
        if kind == BACKWARD and self._splits(worker, start, stage, pair):
            kind, number = BACKWARD_INPUT, BACKWARD_INPUT * self.pairs + pair
        end = start + problem.duration_s[number]
        self.lines[worker].append(number)
        self.free[worker] = end
        self.held[worker] += problem.change_bytes[number]
        changed = [worker]
        if kind == FORWARD:
            self.forwards[stage] += 1
            if stage == problem.num_stages - 1:
                self.arrived[BACKWARD * self.pairs + pair] = end
            else:
                changed.append(self._send(stage, stage + 1, FORWARD * self.pairs + pair + self.count, end))
            return changed
        if kind == BACKWARD_WEIGHT:
            self.weights[worker].popleft()
            self.freed[stage] += 1
            return changed
        self.backwards[stage] += 1
        if kind == BACKWARD:
            self.freed[stage] += 1
        else:
            self.weights[worker].append(BACKWARD_WEIGHT * self.pairs + pair)
        if stage:
            changed.append(self._send(stage, stage - 1, BACKWARD * self.pairs + pair - self.count, end))
        return changed

    def _splits(self, worker: int, start: float, stage: int, pair: int) -> bool:
        """Whether the rule splits this backward."""
        problem, rule = self.problem, self.rule
        if rule.split == "never" or not problem.can_split[stage]:
            return False
        inputs = BACKWARD_INPUT * self.pairs + pair
        if self.held[worker] + problem.change_bytes[inputs] > problem.limit_bytes[worker]:
            return False
        if rule.split == "always":
            return True
        before = problem.stage_workers[stage - 1] if stage else worker
        return before != worker and self.free[before] < start + problem.duration_s[BACKWARD * self.pairs + pair]

    def _send(self, stage: int, target: int, number: int, end: float) -> int:
        """Record the arrival of an activation or gradient at another stage; return its worker."""
        workers, microbatch = self.problem.stage_workers, number % self.count
        if workers[stage] != workers[target]:
            cut = min(stage, target)
            edge = self.edges[cut if target > stage else self.problem.num_stages - 1 + cut]
            end = max(end, self.edge_free[edge]) + self.problem.link_s[cut][microbatch]
            self.edge_free[edge] = end
        self.arrived[number] = end
        return workers[target]
