"""The schedules and placements by name, and what each asks of a plan.

    placement      stages on 2 workers
    in-order       0: s0    1: s1          or, with two stages a worker,  0: s0 s2   1: s1 s3
    v              0: s0 s3                                               1: s1 s2
    client-server  0: s0 s2 (the client)                                  1: s1

How they run is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["PLACEMENTS", "SCHEDULES", "Placement", "ScheduleName", "ScheduleRule"]

ScheduleName: TypeAlias = Literal[
    "gpipe", "1f1b", "interleaved", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev"
]
Placement: TypeAlias = Literal["in-order", "v", "client-server"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRule:
    """What a schedule asks of a plan."""

    stages_per_worker: int = 1
    """Stages that a worker holds, where the plan does not say."""
    any_number_of_stages: bool = False
    """Whether a worker may hold other numbers of stages."""
    placement: Placement = "in-order"
    """Where its stages are."""
    least_microbatches: Callable[[int, int], int] = lambda num_stages, num_workers: 1
    """Micro-batches that it needs at least, from the numbers of stages and of workers in a pipeline."""
    rounds: bool = False
    """Whether micro-batches come in rounds, each with one for every worker."""
    splits_backward: bool = False
    """Whether it splits the backward pass into the inputs' and the weights' part."""


# The seven schedules by name.
SCHEDULES: dict[str, ScheduleRule] = {
    "gpipe": ScheduleRule(),
    "1f1b": ScheduleRule(least_microbatches=lambda num_stages, num_workers: num_stages),
    "interleaved": ScheduleRule(stages_per_worker=2, any_number_of_stages=True, rounds=True),
    "looped-bfs": ScheduleRule(stages_per_worker=2, any_number_of_stages=True),
    "interleaved-zero-bubble": ScheduleRule(
        stages_per_worker=2, any_number_of_stages=True, rounds=True, splits_backward=True
    ),
    "zbv": ScheduleRule(stages_per_worker=2, placement="v", splits_backward=True),
    "dualpipev": ScheduleRule(
        stages_per_worker=2,
        placement="v",
        least_microbatches=lambda num_stages, num_workers: 2 * num_workers,
        splits_backward=True,
    ),
}


def _in_order(num_stages: int, num_workers: int) -> tuple[int, ...]:
    return tuple(stage % num_workers for stage in range(num_stages))


def _v(num_stages: int, num_workers: int) -> tuple[int, ...]:
    there_and_back = [*range(num_workers), *reversed(range(num_workers))]
    return tuple(there_and_back[stage % len(there_and_back)] for stage in range(num_stages))


def _client_server(num_stages: int, num_workers: int) -> tuple[int, ...]:
    """The first and the last stage at the client, worker 0; the others in order on the servers."""
    servers = max(1, num_workers - 1)
    between = tuple(min(1 + stage % servers, num_workers - 1) for stage in range(num_stages - 2))
    return (0, *between, 0)[:num_stages]


# From the numbers of stages and of workers in a pipeline: the worker of each stage.
PLACEMENTS: dict[Placement, Callable[[int, int], tuple[int, ...]]] = {
    "in-order": _in_order,
    "v": _v,
    "client-server": _client_server,
}
