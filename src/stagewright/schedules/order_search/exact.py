"""The best order of a small pipeline, by branch and bound over all orders.

Actions are started one after the other, none before the previous one, so that every order comes up; micro-batches pass
each stage in one order. A partial order is abandoned when the remaining work of a worker can't end before the best
known step.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.schedules.order_search.kinds import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from stagewright.schedules.order_search.problem import Order, OrderProblem

MAX_PAIRS = 12
"""Pairs of a stage and a micro-batch up to which the search is tried."""


@dataclass(slots=True)
class _Partial:
    """The actions started so far."""

    lines: list[tuple[int, ...]]
    free: list[float]
    held: list[int]
    remaining_s: list[float]
    arrived: dict[int, float]
    edge_free: list[float]
    latest_s: float

    def copy(self) -> _Partial:
        return _Partial(
            self.lines[:],
            self.free[:],
            self.held[:],
            self.remaining_s[:],
            dict(self.arrived),
            self.edge_free[:],
            self.latest_s,
        )


class ExactSearch:
    """Branch and bound over the orders of one problem."""

    def __init__(self, problem: OrderProblem, step_s: float, max_nodes: int) -> None:
        self.problem, self.max_nodes = problem, max_nodes
        self.count, self.pairs = problem.num_microbatches, problem.num_pairs
        self.edges = problem.edges()
        self.best: Order | None = None
        self.best_s = step_s
        """The step to beat."""
        self.num_nodes = 0

    def run(self) -> Order | None:
        """Return the best order found, if its step is shorter than the given one. It is the best of all orders if
        ``num_nodes`` stays below ``max_nodes``."""
        problem, workers = self.problem, range(self.problem.num_workers)
        remaining = [
            sum(self._min_work_s(pair) for stage in problem.stages_of(worker) for pair in self._pairs_of(stage))
            for worker in workers
        ]
        start = _Partial(
            lines=[() for _ in workers],
            free=[0.0 for _ in workers],
            held=[0 for _ in workers],
            remaining_s=remaining,
            arrived={FORWARD * self.pairs + pair: 0.0 for pair in self._pairs_of(0)},
            edge_free=[0.0] * (max(self.edges, default=0) + 1),
            latest_s=0.0,
        )
        self._extend(start)
        return self.best

    def _pairs_of(self, stage: int) -> range:
        return range(stage * self.count, (stage + 1) * self.count)

    def _min_work_s(self, pair: int) -> float:
        return self._min_backward_s(pair) + self.problem.duration_s[FORWARD * self.pairs + pair]

    def _min_backward_s(self, pair: int) -> float:
        whole, inputs, weights = (self.problem.duration_s[kind * self.pairs + pair] for kind in range(1, 4))
        return min(whole, inputs + weights) if self.problem.can_split[pair // self.count] else whole

    def _extend(self, partial: _Partial) -> None:
        self.num_nodes += 1
        if self.num_nodes > self.max_nodes:
            return
        choices = sorted(
            (start, number, worker)
            for worker in range(len(partial.lines))
            for start, number in self._startable(partial, worker)
            if start >= partial.latest_s
        )
        if not choices:
            self._finish(partial)
        for start, number, worker in choices:
            extended = partial.copy()
            if self._run(extended, worker, start, number):
                self._extend(extended)

    def _finish(self, partial: _Partial) -> None:
        pairs = [number for line in partial.lines for number in line if number // self.pairs in (1, 3)]
        if len(pairs) < self.pairs:  # memory is full, or an action would start too late
            return
        step_s = max(free + tail for free, tail in zip(partial.free, self.problem.tail_s, strict=True))
        if step_s < self.best_s * (1 - 1e-9):
            self.best, self.best_s = tuple(partial.lines), step_s

    def _startable(self, partial: _Partial, worker: int) -> list[tuple[float, int]]:
        """Return the start and the number of each action that a worker could start next."""
        line, free = partial.lines[worker], partial.free[worker]
        startable: list[tuple[float, int]] = []
        for stage in self.problem.stages_of(worker):
            own = [divmod(number, self.pairs) for number in line if number % self.pairs // self.count == stage]
            num_forwards = sum(kind == FORWARD for kind, _ in own)
            num_backwards = sum(kind in (BACKWARD, BACKWARD_INPUT) for kind, _ in own)
            pair = stage * self.count + num_forwards
            if num_forwards < self.count and FORWARD * self.pairs + pair in partial.arrived:
                startable.append((max(free, partial.arrived[pair]), pair))
            pair = stage * self.count + num_backwards
            arrival = partial.arrived.get(BACKWARD * self.pairs + pair) if num_backwards < num_forwards else None
            if arrival is not None:
                kinds = (BACKWARD, BACKWARD_INPUT) if self.problem.can_split[stage] else (BACKWARD,)
                startable += [(max(free, arrival), kind * self.pairs + pair) for kind in kinds]
            done = {pair for kind, pair in own if kind == BACKWARD_WEIGHT}
            pending = [pair for kind, pair in own if kind == BACKWARD_INPUT and pair not in done]
            startable += [(free, BACKWARD_WEIGHT * self.pairs + pair) for pair in pending[:1]]
        limit = self.problem.limit_bytes[worker] - partial.held[worker]
        return [(start, number) for start, number in startable if self.problem.change_bytes[number] <= limit]

    def _run(self, partial: _Partial, worker: int, start: float, number: int) -> bool:
        """Start an action; return whether the step can still be shorter than the best."""
        problem, (kind, pair) = self.problem, divmod(number, self.pairs)
        stage, seconds = pair // self.count, problem.duration_s[number]
        end = start + seconds
        partial.lines[worker] = (*partial.lines[worker], number)
        partial.latest_s, partial.free[worker] = start, end
        partial.held[worker] += problem.change_bytes[number]
        spared = {
            FORWARD: seconds,
            BACKWARD: self._min_backward_s(pair),
            BACKWARD_INPUT: self._min_backward_s(pair) - problem.duration_s[BACKWARD_WEIGHT * self.pairs + pair],
            BACKWARD_WEIGHT: seconds,
        }
        partial.remaining_s[worker] -= spared[kind]
        if end + partial.remaining_s[worker] + problem.tail_s[worker] >= self.best_s * (1 - 1e-9):
            return False
        if kind == FORWARD and stage < problem.num_stages - 1:
            self._send(partial, stage, stage + 1, FORWARD * self.pairs + pair + self.count, end)
        elif kind == FORWARD:
            partial.arrived[BACKWARD * self.pairs + pair] = end
        elif kind in (BACKWARD, BACKWARD_INPUT) and stage:
            self._send(partial, stage, stage - 1, BACKWARD * self.pairs + pair - self.count, end)
        return True

    def _send(self, partial: _Partial, stage: int, target: int, number: int, end: float) -> None:
        workers = self.problem.stage_workers
        if workers[stage] != workers[target]:
            cut = min(stage, target)
            edge = self.edges[cut if target > stage else self.problem.num_stages - 1 + cut]
            end = max(end, partial.edge_free[edge]) + self.problem.link_s[cut][number % self.count]
            partial.edge_free[edge] = end
        partial.arrived[number] = end
