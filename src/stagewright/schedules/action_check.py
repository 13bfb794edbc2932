"""The check of an order of actions from a file.

actions = ["0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1W0 1B1"]        one text per pipeline worker, in its order
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stagewright.errors import UsageError
from stagewright.schedules.action_order import Action, Actions, Kind


def check_actions(actions: Actions, stage_workers: Sequence[int], num_microbatches: int) -> None:
    """Raise UsageError unless each worker runs each of its actions once, in an order that does not deadlock."""
    num_workers = max(stage_workers) + 1
    if len(actions) != num_workers:
        raise UsageError(
            f"actions has {len(actions)} orders for {num_workers} pipeline workers: give one for each worker"
        )
    for worker, line in enumerate(actions):
        _check_worker(worker, line, stage_workers, num_microbatches)
    _check_deadlock(actions, len(stage_workers))


def _check_worker(worker: int, line: Sequence[Action], stage_workers: Sequence[int], num_microbatches: int) -> None:
    own = [stage for stage, owner in enumerate(stage_workers) if owner == worker]
    for action in line:
        if action.stage not in own:
            raise UsageError(
                f"actions: worker {worker} runs {action}, but holds stages {', '.join(map(str, own))}: move the action "
                "to the worker of its stage, or leave out actions and search again"
            )
        if action.microbatch >= num_microbatches:
            raise UsageError(
                f"actions: worker {worker} runs {action}, but the plan has micro-batches 0 to {num_microbatches - 1}: "
                "change microbatches, or leave out actions and search again"
            )
    counts = Counter((action.kind, action.stage, action.microbatch) for action in line)
    for stage in own:
        for microbatch in range(num_microbatches):
            forward, whole, inputs, weights = (counts[kind, stage, microbatch] for kind in Kind)
            if forward != 1 or (whole, inputs, weights) not in ((1, 0, 0), (0, 1, 1)):
                raise UsageError(
                    f"actions: worker {worker} must run stage {stage} of micro-batch {microbatch} as F and B, or as "
                    f"F, I and W, once each; its order has {forward} F, {whole} B, {inputs} I and {weights} W"
                )


def _check_deadlock(actions: Actions, num_stages: int) -> None:
    done: set[tuple[Kind, int, int]] = set()
    positions = [0] * len(actions)
    progressed = True
    while progressed:
        progressed = False
        for worker, line in enumerate(actions):
            while positions[worker] < len(line) and _is_ready(line[positions[worker]], num_stages, done):
                action = line[positions[worker]]
                done.add((action.kind, action.stage, action.microbatch))
                positions[worker] += 1
                progressed = True
    waiting = [
        f"worker {worker} waits with {line[position]}"
        for worker, (line, position) in enumerate(zip(actions, positions, strict=True))
        if position < len(line)
    ]
    if waiting:
        raise UsageError(
            f"actions: the order deadlocks: {', '.join(waiting)}; put what they wait for first, or leave out actions "
            "and search again"
        )


def _is_ready(action: Action, num_stages: int, done: set[tuple[Kind, int, int]]) -> bool:
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return stage == 0 or (Kind.FORWARD, stage - 1, microbatch) in done
    if action.kind is Kind.BACKWARD_WEIGHT:
        return (Kind.BACKWARD_INPUT, stage, microbatch) in done
    behind = {(Kind.BACKWARD, stage + 1, microbatch), (Kind.BACKWARD_INPUT, stage + 1, microbatch)}
    return (Kind.FORWARD, stage, microbatch) in done and (stage == num_stages - 1 or bool(behind & done))
