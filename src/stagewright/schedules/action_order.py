"""The order of actions of each pipeline schedule, as data. The engine and the simulator execute these orders.

F is a forward, B a backward; I and W are the input-gradient and weight-gradient halves of a split backward.
One-forward-one-backward on 3 ranks, 4 micro-batches, time to the right:

    rank 0   F0 F1 F2          B0 F3    B1    B2    B3
    rank 1      F0 F1    B0 F2 B1    F3 B2    B3
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3

GPipe and 1F1B are implemented here for any placement of the stages. A plan stores a searched order, as text. The other
orders come from torch's schedule classes (their ``pipeline_order``, accessed only in this file). A smaller last batch
has fewer micro-batches; dropping the actions of the missing ones keeps every order valid, because dependencies never
cross micro-batches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import count
from types import SimpleNamespace
from typing import Any, Final

from stagewright.errors import UsageError


class Kind(Enum):
    """Kind of an action."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """The forward or backward of one micro-batch on one stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


Actions = tuple[tuple[Action, ...], ...]

SEARCHED: Final = "searched"
"""The schedule whose order a plan stores."""
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
_TORCH_NAMES = {
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


@lru_cache(maxsize=256)
def schedule_actions(
    schedule: str,
    stage_workers: tuple[int, ...],
    num_microbatches: int,
    num_present: int | None = None,
    searched: tuple[str, ...] = (),
) -> Actions:
    """Return the actions of every pipeline worker, given the worker of each stage.

    A smaller last batch has only the first ``num_present`` micro-batches. ``searched``: the order of the schedule of
    that name, as text; for more micro-batches than it has, it is repeated.
    """
    num_workers, num_stages = max(stage_workers) + 1, len(stage_workers)
    one_stage_per_worker = stage_workers == tuple(range(num_workers))
    if schedule == SEARCHED and num_workers == 1:
        schedule = "1f1b"
    if schedule == SEARCHED:
        orders = _repeat(parse_actions(searched), num_microbatches)
    elif schedule == "gpipe" and one_stage_per_worker:
        orders = tuple(_gpipe(worker, num_microbatches) for worker in range(num_workers))
    elif schedule == "1f1b" and one_stage_per_worker:
        orders = tuple(
            _one_forward_one_backward(worker, num_workers, num_microbatches) for worker in range(num_workers)
        )
    elif schedule in ("gpipe", "1f1b"):
        orders = _greedy(stage_workers, num_microbatches, forward_first=schedule == "gpipe")
    else:
        orders = _from_torch(schedule, num_workers, num_stages // num_workers, num_microbatches)
    assert all(stage_workers[action.stage] == worker for worker, actions in enumerate(orders) for action in actions)
    present = num_microbatches if num_present is None else num_present
    return tuple(tuple(action for action in actions if action.microbatch < present) for actions in orders)


@lru_cache(maxsize=256)
def forward_actions(stage_workers: tuple[int, ...], num_microbatches: int) -> Actions:
    """Return the forward-only actions of every worker, for any placement."""
    exists = range(num_microbatches).__contains__
    return tuple(tuple(forward_stream(stage_workers, worker, exists)) for worker in range(max(stage_workers) + 1))


def forward_stream(stage_workers: tuple[int, ...], worker: int, exists: Callable[[int], bool]) -> Iterator[Action]:
    """Yield one worker's forwards of a stream: stage s runs micro-batch k at tick s + k and waits for no later tick.

    ``exists(k)`` returns whether the stream has a k-th micro-batch; it is called when that micro-batch is due.
    """
    stages = [stage for stage, owner in enumerate(stage_workers) if owner == worker]
    for tick in count():
        microbatches = {stage: tick - stage for stage in stages}
        due = {stage: number for stage, number in microbatches.items() if number >= 0 and exists(number)}
        if not due and min(microbatches.values()) >= 0:
            return
        for stage, number in due.items():
            yield Action(Kind.FORWARD, stage, number)


def format_actions(actions: Actions) -> tuple[str, ...]:
    """Format the actions of every worker as text: stage, kind and micro-batch of each, as in torch's schedule files."""
    return tuple(" ".join(map(str, line)) for line in actions)


def parse_actions(lines: Sequence[str]) -> Actions:
    """Parse the actions of every worker."""
    return tuple(tuple(_parse_action(word) for word in line.split()) for line in lines)


def _parse_action(word: str) -> Action:
    matched = _ACTION.fullmatch(word)
    if matched is None:
        raise UsageError(f"{word!r} is not an action: write stage, kind (F, B, I or W) and micro-batch, like 0F3")
    stage, kind, microbatch = matched.groups()
    return Action(Kind(kind), int(stage), int(microbatch))


def _repeat(searched: Actions, num_microbatches: int) -> Actions:
    """Repeat an order until it has this many micro-batches."""
    assert searched, "the order was not searched yet"
    size = 1 + max(action.microbatch for action in searched[0])
    return tuple(
        tuple(
            Action(action.kind, action.stage, action.microbatch + first)
            for first in range(0, num_microbatches, size)
            for action in actions
        )
        for actions in searched
    )


def _gpipe(rank: int, num_microbatches: int) -> tuple[Action, ...]:
    """Order all forwards, then all backwards."""
    forwards = [Action(Kind.FORWARD, rank, microbatch) for microbatch in range(num_microbatches)]
    return (*forwards, *(Action(Kind.BACKWARD, rank, microbatch) for microbatch in range(num_microbatches)))


def _one_forward_one_backward(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """Order the warm-up forwards, then one forward and one backward alternately, then the drain."""
    warmup = min(num_microbatches, num_ranks - rank - 1)
    actions = [Action(Kind.FORWARD, rank, microbatch) for microbatch in range(warmup)]
    for microbatch in range(warmup, num_microbatches):
        actions.append(Action(Kind.FORWARD, rank, microbatch))
        actions.append(Action(Kind.BACKWARD, rank, microbatch - warmup))
    actions += [
        Action(Kind.BACKWARD, rank, microbatch) for microbatch in range(num_microbatches - warmup, num_microbatches)
    ]
    return tuple(actions)


def _greedy(stage_workers: tuple[int, ...], num_microbatches: int, *, forward_first: bool) -> Actions:
    """Order GPipe or 1F1B for any placement: at each tick, each worker runs its first ready action.

    ``forward_first`` (GPipe) prefers forwards. Otherwise (1F1B) backwards come first, and the micro-batches in flight
    on a stage never exceed the number of stages from it to the last.
    """
    num_stages = len(stage_workers)
    done: dict[Action, int] = {}
    order: list[list[Action]] = [[] for _ in range(max(stage_workers) + 1)]
    forwards, backwards = [0] * num_stages, [0] * num_stages
    tick = 0

    def ready(action: Action) -> bool:
        step = -1 if action.kind is Kind.FORWARD else 1
        dependencies = [Action(action.kind, action.stage + step, action.microbatch)]
        if not 0 <= dependencies[0].stage < num_stages:
            dependencies = (
                [] if action.kind is Kind.FORWARD else [Action(Kind.FORWARD, action.stage, action.microbatch)]
            )
        return all(done.get(dependency, tick) < tick for dependency in dependencies)

    while sum(backwards) < num_stages * num_microbatches:
        chosen: list[Action] = []
        for worker in range(len(order)):
            stages = [stage for stage in range(num_stages) if stage_workers[stage] == worker]
            backward_candidates = [
                Action(Kind.BACKWARD, stage, backwards[stage]) for stage in stages if backwards[stage] < forwards[stage]
            ]
            forward_candidates = [
                Action(Kind.FORWARD, stage, forwards[stage])
                for stage in reversed(stages)
                if forwards[stage] < num_microbatches
                and (forward_first or forwards[stage] - backwards[stage] < num_stages - stage)
            ]
            if forward_first and forward_candidates:
                backward_candidates = []
            choice = next((action for action in (*backward_candidates, *forward_candidates) if ready(action)), None)
            if choice is not None:
                chosen.append(choice)
        for action in chosen:
            done[action] = tick
            order[stage_workers[action.stage]].append(action)
            (forwards if action.kind is Kind.FORWARD else backwards)[action.stage] += 1
        tick += 1
    return tuple(map(tuple, order))


def _from_torch(schedule: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Actions:
    """Convert the order of a torch schedule class to actions."""
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    base = get_schedule_class(_TORCH_NAMES[schedule])
    assert issubclass(base, PipelineScheduleMulti)
    # Skip the communication actions that torch adds; the engine derives its own.
    compute_only = type(base.__name__, (base,), {"_prepare_schedule_with_comms": lambda *args, **kwargs: None})
    stage: Any = SimpleNamespace(
        group_rank=0, group_size=num_ranks, num_stages=stages_per_rank * num_ranks, submod=None, is_last=False
    )
    try:
        orders = compute_only([stage] * stages_per_rank, num_microbatches).pipeline_order
    except (ValueError, AssertionError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "torch rejects it")
        raise UsageError(
            f"schedule {schedule!r} can't run {num_microbatches} micro-batches on {num_ranks} workers with "
            f"{stages_per_rank} stages each: {reason}"
        ) from error
    # By name: the values differ between versions of torch.
    kinds = {
        "FORWARD": Kind.FORWARD,
        "FULL_BACKWARD": Kind.BACKWARD,
        "BACKWARD_INPUT": Kind.BACKWARD_INPUT,
        "BACKWARD_WEIGHT": Kind.BACKWARD_WEIGHT,
    }
    converted: list[tuple[Action, ...]] = []
    for rank in range(num_ranks):
        actions: list[Action] = []
        for operation in orders[rank]:
            parts = () if operation is None else operation.sub_actions or (operation,)
            for part in parts:
                kind = part.computation_type.name
                if kind in kinds and part.microbatch_index is not None:
                    actions.append(Action(kinds[kind], part.stage_index, part.microbatch_index))
        converted.append(tuple(actions))
    return tuple(converted)
