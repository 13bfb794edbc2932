"""The schedules and placements by name, and what each requires of a plan.

    placement      stages on 2 workers
    in-order       0: s0    1: s1          or, with two stages per worker, 0: s0 s2   1: s1 s3
    v              0: s0 s3                                               1: s1 s2
    client-server  0: s0 s2 (the client)                                  1: s1

`action_order` defines the order of each schedule; the engine executes it. The order of "searched" is found by
`order_search` for the measured times of a model, and a plan stores it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

ScheduleName: TypeAlias = Literal[
    "gpipe", "1f1b", "interleaved", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev", "searched"
]
Placement: TypeAlias = Literal["in-order", "v", "client-server"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRule:
    """What a schedule requires of a plan."""

    stages_per_worker: int = 1
    """Default number of stages per worker."""
    any_number_of_stages: bool = False
    """Whether a plan may set another number of stages per worker."""
    placement: Placement = "in-order"
    """Default placement."""
    any_placement: bool = False
    """Whether a plan may also place stages as a V, whatever the default."""
    min_microbatches: Callable[[int, int], int] = lambda num_stages, num_workers: 1
    """Minimum number of micro-batches, from the numbers of stages and of pipeline workers."""
    rounds: bool = False
    """Whether micro-batches run in rounds of one per worker."""
    splits_backward: bool = False
    """Whether it splits backward into input-gradient and weight-gradient halves."""


SCHEDULES: dict[str, ScheduleRule] = {
    "gpipe": ScheduleRule(),
    "1f1b": ScheduleRule(min_microbatches=lambda num_stages, num_workers: num_stages),
    "interleaved": ScheduleRule(stages_per_worker=2, any_number_of_stages=True, rounds=True),
    "looped-bfs": ScheduleRule(stages_per_worker=2, any_number_of_stages=True),
    "interleaved-zero-bubble": ScheduleRule(
        stages_per_worker=2, any_number_of_stages=True, rounds=True, splits_backward=True
    ),
    "zbv": ScheduleRule(stages_per_worker=2, placement="v", splits_backward=True),
    "dualpipev": ScheduleRule(
        stages_per_worker=2,
        placement="v",
        min_microbatches=lambda num_stages, num_workers: 2 * num_workers,
        splits_backward=True,
    ),
    "searched": ScheduleRule(any_number_of_stages=True, any_placement=True, splits_backward=True),
}
FIXED_SCHEDULES = tuple(name for name in SCHEDULES if name != "searched")
"""The schedules whose order follows from stages, workers and micro-batches alone."""


def _in_order(num_stages: int, num_workers: int) -> tuple[int, ...]:
    return tuple(stage % num_workers for stage in range(num_stages))


def _v(num_stages: int, num_workers: int) -> tuple[int, ...]:
    round_trip = [*range(num_workers), *reversed(range(num_workers))]
    return tuple(round_trip[stage % len(round_trip)] for stage in range(num_stages))


def _client_server(num_stages: int, num_workers: int) -> tuple[int, ...]:
    """Put the first and the last stage on the client, worker 0, and the others in order on the servers."""
    num_servers = max(1, num_workers - 1)
    server_stages = tuple(min(1 + stage % num_servers, num_workers - 1) for stage in range(num_stages - 2))
    return (0, *server_stages, 0)[:num_stages]


# Map the numbers of stages and pipeline workers to the worker of each stage.
PLACEMENTS: dict[Placement, Callable[[int, int], tuple[int, ...]]] = {
    "in-order": _in_order,
    "v": _v,
    "client-server": _client_server,
}
