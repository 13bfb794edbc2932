"""Local search: improve an order by changes along its critical path.

    swap      two neighbors on one worker, at the start or end of a run of critical actions
    delay     a critical W, until after the run of critical actions or after the worker's last action
    split     a critical B, whose input gradient another worker waits for, into I and a later W
    merge     a critical I, or a critical W, with its other half into B

Each step takes the best change that leads to an order not seen before, also if it is worse, and the best order of all
is returned. A change that breaks a dependency or a memory limit is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from stagewright.schedules.order_search.kinds import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from stagewright.schedules.order_search.problem import Order
from stagewright.schedules.order_search.timing import OrderTimer, OrderTimes

_MAX_WITHOUT_GAIN = 24
_DELAYS = (0, 1, 2, 4)


def improve(timer: OrderTimer, order: Order, max_timed: int, min_step_s: float) -> tuple[Order, OrderTimes]:
    """Return the best order found from another, after timing at most `max_timed`, or when the bound is reached."""
    moves = _Moves(timer)
    current, times = order, timer.time(order)
    best, best_times = current, times
    seen, without_gain, last = {current}, 0, timer.num_timed + max_timed
    while without_gain < _MAX_WITHOUT_GAIN and timer.num_timed < last and best_times.step_s > min_step_s * (1 + 1e-9):
        neighbor: tuple[Order, OrderTimes] | None = None
        for changed in moves.neighbors(current, times):
            if changed in seen or not timer.problem.fits(changed):
                continue
            seen.add(changed)
            changed_times = timer.time(changed)
            if changed_times.step_s < float("inf") and (neighbor is None or changed_times.key < neighbor[1].key):
                neighbor = changed, changed_times
            if timer.num_timed >= last:
                break
        if neighbor is None:
            break
        current, times = neighbor
        without_gain += 1
        if times.key < best_times.key:
            best, best_times, without_gain = current, times, 0
    return best, best_times


class _Moves:
    """The changes along a critical path."""

    def __init__(self, timer: OrderTimer) -> None:
        self.timer, self.problem = timer, timer.problem
        self.pairs = timer.problem.num_pairs

    def neighbors(self, order: Order, times: OrderTimes) -> Iterator[Order]:
        """Yield the orders that differ by one change."""
        path = self.timer.critical_path(order, times)[::-1]
        position = {number: index for line in order for index, number in enumerate(line)}
        for worker, run in groupby(path, key=self._worker):
            numbers = list(run)
            first, last = position[numbers[0]], position[numbers[-1]]
            line = order[worker]
            for changed in self._changes(line, first, last, numbers):
                yield (*order[:worker], changed, *order[worker + 1 :])

    def _worker(self, number: int) -> int:
        return self.problem.stage_workers[number % self.pairs // self.problem.num_microbatches]

    def _changes(self, line: tuple[int, ...], first: int, last: int, numbers: list[int]) -> Iterator[tuple[int, ...]]:
        """Yield a worker's line with one change of its critical actions, from `first` to `last`."""
        for index in dict.fromkeys((first - 1, first, last - 1)):
            if 0 <= index < len(line) - 1 and self._can_swap(line[index], line[index + 1]):
                yield (*line[:index], line[index + 1], line[index], *line[index + 2 :])
        for index in range(first, last + 1):
            number = line[index]
            kind, pair = divmod(number, self.pairs)
            if kind == BACKWARD_WEIGHT:
                for target in dict.fromkeys((last + 1, len(line))):
                    yield (*line[:index], *line[index + 1 : target], number, *line[target:])
            if kind in (BACKWARD_INPUT, BACKWARD_WEIGHT):
                yield from self._merge(line, pair)
            elif kind == BACKWARD and index >= last - 1 and self._can_split(pair):
                inputs, weight = BACKWARD_INPUT * self.pairs + pair, BACKWARD_WEIGHT * self.pairs + pair
                for delay in (*_DELAYS, len(line)):
                    target = min(len(line), index + 1 + delay)
                    yield (*line[:index], inputs, *line[index + 1 : target], weight, *line[target:])
        if last - first > 1:  # an action of the run first or last
            for index in (first + 1, last):
                if all(self._can_swap(line[before], line[index]) for before in range(first, index)):
                    yield (*line[:first], line[index], *line[first:index], *line[index + 1 :])
            for index in (first, last - 1):
                if all(self._can_swap(line[index], line[behind]) for behind in range(index + 1, last + 1)):
                    yield (*line[:index], *line[index + 1 : last + 1], line[index], *line[last + 1 :])

    def _can_split(self, pair: int) -> bool:
        return self.problem.can_split[pair // self.problem.num_microbatches]

    def _merge(self, line: tuple[int, ...], pair: int) -> Iterator[tuple[int, ...]]:
        """Merge I and W into B, at the place of I."""
        whole, inputs, weight = (kind * self.pairs + pair for kind in (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT))
        yield tuple(whole if number == inputs else number for number in line if number != weight)

    def _can_swap(self, before: int, behind: int) -> bool:
        """Whether two actions of a worker may change places: not F, I and W of one pair, nor two of one kind."""
        kind, pair = divmod(before, self.pairs)
        other_kind, other_pair = divmod(behind, self.pairs)
        if pair == other_pair:
            return False
        if pair // self.problem.num_microbatches != other_pair // self.problem.num_microbatches:
            return True
        return _direction(kind) != _direction(other_kind)


def _direction(kind: int) -> int:
    """Return a number that B and I share: micro-batches pass a stage in one order."""
    return {FORWARD: 0, BACKWARD: 1, BACKWARD_INPUT: 1, BACKWARD_WEIGHT: 2}[kind]
