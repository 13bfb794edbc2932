"""Schedules as data: which worker does what in which order. Nothing here runs anything.

A schedule gives every worker of a pipeline its actions; F is a forward, B a backward, I and W its two halves (for the
inputs, for the weights). One-forward-one-backward on 3 ranks, 4 micro-batches, time to the right:

    rank 0   F0 F1 F2          B0 F3    B1    B2    B3
    rank 1      F0 F1    B0 F2 B1    F3 B2    B3
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3

GPipe and 1F1B are written here, for any placement of the stages; the orders of the others come from torch's own
schedule classes (their ``pipeline_order``, reached from this file only). Micro-batches that a small last batch does not
have are left out of the actions, which keeps every order valid: dependencies lie within one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import count
from types import SimpleNamespace
from typing import Any

from stagewright.errors import UsageError

__all__ = ["Action", "Actions", "Kind", "forward_actions", "forward_stream", "schedule_actions"]


class Kind(Enum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work: this stage, this micro-batch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


Actions = tuple[tuple[Action, ...], ...]

_TORCH_NAMES = {
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


@lru_cache(maxsize=256)
def schedule_actions(
    schedule: str, stage_workers: tuple[int, ...], num_microbatches: int, num_present: int | None = None
) -> Actions:
    """The actions of every worker of a pipeline, given the worker of each stage.

    Only the first ``num_present`` micro-batches exist in a small last batch.
    """
    num_workers, num_stages = max(stage_workers) + 1, len(stage_workers)
    plain = stage_workers == tuple(range(num_workers))
    if schedule == "gpipe" and plain:
        every = tuple(_gpipe(worker, num_microbatches) for worker in range(num_workers))
    elif schedule == "1f1b" and plain:
        every = tuple(_one_forward_one_backward(worker, num_workers, num_microbatches) for worker in range(num_workers))
    elif schedule in ("gpipe", "1f1b"):
        every = _greedy(stage_workers, num_microbatches, eager=schedule == "gpipe")
    else:
        every = _from_torch(schedule, num_workers, num_stages // num_workers, num_microbatches)
    assert all(stage_workers[action.stage] == worker for worker, actions in enumerate(every) for action in actions)
    present = num_microbatches if num_present is None else num_present
    return tuple(tuple(action for action in actions if action.microbatch < present) for actions in every)


@lru_cache(maxsize=256)
def forward_actions(stage_workers: tuple[int, ...], num_microbatches: int) -> Actions:
    """Forward alone, for any placement."""
    there = range(num_microbatches).__contains__
    return tuple(tuple(forward_stream(stage_workers, worker, there)) for worker in range(max(stage_workers) + 1))


def forward_stream(stage_workers: tuple[int, ...], worker: int, exists: Callable[[int], bool]) -> Iterator[Action]:
    """One worker's forwards of a stream: stage s does micro-batch k at tick s + k, so no one waits for a later tick.

    ``exists(k)`` says whether the stream has a k-th micro-batch; it is asked when that one's turn comes.
    """
    own = [stage for stage, one in enumerate(stage_workers) if one == worker]
    for tick in count():
        numbers = {stage: tick - stage for stage in own}
        here = {stage: number for stage, number in numbers.items() if number >= 0 and exists(number)}
        if not here and min(numbers.values()) >= 0:
            return
        for stage, number in here.items():
            yield Action(Kind.FORWARD, stage, number)


def _gpipe(rank: int, num_microbatches: int) -> tuple[Action, ...]:
    """All forwards, then all backwards."""
    forwards = [Action(Kind.FORWARD, rank, microbatch) for microbatch in range(num_microbatches)]
    return (*forwards, *(Action(Kind.BACKWARD, rank, microbatch) for microbatch in range(num_microbatches)))


def _one_forward_one_backward(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """Fill the ranks behind, then alternate, then drain."""
    warm = min(num_microbatches, num_ranks - rank - 1)
    actions = [Action(Kind.FORWARD, rank, microbatch) for microbatch in range(warm)]
    for microbatch in range(warm, num_microbatches):
        actions.append(Action(Kind.FORWARD, rank, microbatch))
        actions.append(Action(Kind.BACKWARD, rank, microbatch - warm))
    actions += [
        Action(Kind.BACKWARD, rank, microbatch) for microbatch in range(num_microbatches - warm, num_microbatches)
    ]
    return tuple(actions)


def _greedy(stage_workers: tuple[int, ...], num_microbatches: int, *, eager: bool) -> Actions:
    """GPipe or 1F1B for any placement: tick by tick, each worker does the first thing that is ready.

    ``eager`` (GPipe) takes forwards first; otherwise backwards first, and no stage runs ahead of the last one by more
    micro-batches than there are stages behind it.
    """
    num_stages = len(stage_workers)
    done: dict[Action, int] = {}
    order: list[list[Action]] = [[] for _ in range(max(stage_workers) + 1)]
    forwards, backwards = [0] * num_stages, [0] * num_stages
    tick = 0

    def ready(action: Action) -> bool:
        step = -1 if action.kind is Kind.FORWARD else 1
        before = [Action(action.kind, action.stage + step, action.microbatch)]
        if not 0 <= before[0].stage < num_stages:
            before = [] if action.kind is Kind.FORWARD else [Action(Kind.FORWARD, action.stage, action.microbatch)]
        return all(done.get(one, tick) < tick for one in before)

    while sum(backwards) < num_stages * num_microbatches:
        chosen: list[Action] = []
        for worker in range(len(order)):
            stages = [stage for stage in range(num_stages) if stage_workers[stage] == worker]
            back = [
                Action(Kind.BACKWARD, stage, backwards[stage]) for stage in stages if backwards[stage] < forwards[stage]
            ]
            ahead = [
                Action(Kind.FORWARD, stage, forwards[stage])
                for stage in reversed(stages)
                if forwards[stage] < num_microbatches
                and (eager or forwards[stage] - backwards[stage] < num_stages - stage)
            ]
            if eager and ahead:
                back = []
            choice = next((action for action in (*back, *ahead) if ready(action)), None)
            if choice is not None:
                chosen.append(choice)
        for action in chosen:
            done[action] = tick
            order[stage_workers[action.stage]].append(action)
            (forwards if action.kind is Kind.FORWARD else backwards)[action.stage] += 1
        tick += 1
    return tuple(map(tuple, order))


def _from_torch(schedule: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Actions:
    """The orders that torch's own class has, as our actions."""
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    ordered = get_schedule_class(_TORCH_NAMES[schedule])
    assert issubclass(ordered, PipelineScheduleMulti)
    # Without what its class adds to the orders: collectives and messages, which the engine finds for itself.
    plain = type(ordered.__name__, (ordered,), {"_prepare_schedule_with_comms": lambda *given, **options: None})
    stage: Any = SimpleNamespace(
        group_rank=0, group_size=num_ranks, num_stages=stages_per_rank * num_ranks, submod=None, is_last=False
    )
    try:
        orders = plain([stage] * stages_per_rank, num_microbatches).pipeline_order
    except (ValueError, AssertionError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "torch refuses")
        raise UsageError(
            f"schedule {schedule!r} can't run {num_microbatches} micro-batches on {num_ranks} workers with "
            f"{stages_per_rank} stages each: {reason}"
        ) from error
    kinds = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.BACKWARD_INPUT, "W": Kind.BACKWARD_WEIGHT}
    found: list[tuple[Action, ...]] = []
    for rank in range(num_ranks):
        actions: list[Action] = []
        for operation in orders[rank]:
            parts = () if operation is None else operation.sub_actions or (operation,)
            for part in parts:
                kind = part.computation_type.value
                if kind in kinds and part.microbatch_index is not None:
                    actions.append(Action(kinds[kind], part.stage_index, part.microbatch_index))
        found.append(tuple(actions))
    return tuple(found)
