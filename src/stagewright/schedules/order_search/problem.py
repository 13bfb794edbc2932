"""What an order of actions is searched for: times, saved activations and limits; and the step of an order.

An action is a number here, so that thousands of orders can be timed in a second:

    number = (kind · stages + stage) · micro-batches + micro-batch         kind: 0 F, 1 B, 2 I, 3 W

As in a forecast, an action starts when its worker is free and its input has arrived, and a link carries one transfer
per direction after the other. Unlike in a forecast, receives are always posted; the caller compares the best orders by
their forecasts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from stagewright.schedules.action_order import Action, Actions
from stagewright.schedules.order_search.kinds import FORWARD, KINDS

Order: TypeAlias = tuple[tuple[int, ...], ...]
"""The actions of every worker, as numbers."""
Table: TypeAlias = tuple[tuple[float, ...], ...]
"""A value for each stage and micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderProblem:
    """A pipeline of which the order of actions is open."""

    stage_workers: tuple[int, ...]
    """The worker of each stage."""
    action_s: tuple[Table, Table, Table, Table]
    """Duration of F, B, I and W on each stage, for each micro-batch."""
    link_s: Table
    """Duration of a transfer over each cut, in either direction; unused between stages of one worker."""
    saved_bytes: tuple[tuple[int, ...], ...]
    """Activations that each stage saves from F to B or W of a micro-batch."""
    pending_bytes: tuple[tuple[int, ...], ...]
    """What a stage holds in addition between I and W."""
    limit_bytes: tuple[float, ...]
    """The most that the stages of each worker may hold; infinite without a limit."""
    tail_s: tuple[float, ...]
    """What each worker does after its last action: gradient all-reduce, optimizer step."""
    can_split: tuple[bool, ...]
    """Whether the backward of each stage can be split into I and W."""
    duration_s: tuple[float, ...] = field(init=False, repr=False)
    """Duration of every action."""
    change_bytes: tuple[int, ...] = field(init=False, repr=False)
    """Change of its worker's saved activations by every action."""

    def __post_init__(self) -> None:
        duration = [seconds for table in self.action_s for row in table for seconds in row]
        saved = [size for row in self.saved_bytes for size in row]
        pending = [size for row in self.pending_bytes for size in row]
        freed = [-size - held for size, held in zip(saved, pending, strict=True)]
        object.__setattr__(self, "duration_s", tuple(duration))
        object.__setattr__(self, "change_bytes", (*saved, *(-size for size in saved), *pending, *freed))

    @property
    def num_workers(self) -> int:
        return len(self.limit_bytes)

    @property
    def num_stages(self) -> int:
        return len(self.stage_workers)

    @property
    def num_microbatches(self) -> int:
        return len(self.saved_bytes[0])

    @property
    def num_pairs(self) -> int:
        """Number of pairs of a stage and a micro-batch."""
        return self.num_stages * self.num_microbatches

    def stages_of(self, worker: int) -> list[int]:
        """Return the stages of a worker."""
        return [stage for stage, owner in enumerate(self.stage_workers) if owner == worker]

    def edges(self) -> list[int]:
        """Number the link that each stage's activations take (by stage), then that of its gradients."""
        workers = self.stage_workers
        forward = list(zip(workers, workers[1:], [False] * len(workers), strict=False))
        backward = [(later, earlier, True) for earlier, later, _ in forward]
        numbers: dict[tuple[int, int, bool], int] = {}
        return [numbers.setdefault(edge, len(numbers)) for edge in (*forward, *backward)]

    def encode(self, actions: Actions) -> Order:
        """Number the actions of every worker."""
        stages, count = self.num_stages, self.num_microbatches
        return tuple(
            tuple((KINDS.index(action.kind) * stages + action.stage) * count + action.microbatch for action in line)
            for line in actions
        )

    def decode(self, order: Order) -> Actions:
        """Return the actions of an order."""
        return tuple(tuple(self.action(number) for number in line) for line in order)

    def action(self, number: int) -> Action:
        """Return the action of a number."""
        kind, pair = divmod(number, self.num_pairs)
        return Action(KINDS[kind], *divmod(pair, self.num_microbatches))

    def peak_bytes(self, line: Sequence[int]) -> int:
        """Return the most that a worker with these actions holds."""
        return max(itertools.accumulate(map(self.change_bytes.__getitem__, line)), default=0)

    def fits(self, order: Order) -> bool:
        """Whether an order keeps every worker's limit."""
        return all(self.peak_bytes(line) <= limit for line, limit in zip(order, self.limit_bytes, strict=True))

    def min_step_s(self) -> float:
        """Return a lower bound on the step of any order: the way to a worker's first stage, and all its work."""
        reached, seconds = [0.0], 0.0
        for stage, (before, behind) in enumerate(itertools.pairwise(self.stage_workers)):
            link = min(self.link_s[stage]) if before != behind else 0.0
            seconds += min(self.action_s[FORWARD][stage]) + link
            reached.append(seconds)
        return max(
            min(reached[stage] for stage in self.stages_of(worker))
            + sum(sum(map(min, *self._works(stage))) for stage in self.stages_of(worker))
            + self.tail_s[worker]
            for worker in range(self.num_workers)
        )

    def _works(self, stage: int) -> tuple[list[float], list[float]]:
        """Return the work of each micro-batch on a stage, with B and with I and W."""
        forward, whole, inputs, weights = (table[stage] for table in self.action_s)
        unsplit = [a + b for a, b in zip(forward, whole, strict=True)]
        if not self.can_split[stage]:
            return unsplit, unsplit
        return unsplit, [a + b + c for a, b, c in zip(forward, inputs, weights, strict=True)]
