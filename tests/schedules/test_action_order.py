"""Schedules as data: drawn, complete, and never waiting for something that comes later."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from stagewright.errors import UsageError
from stagewright.schedules.action_order import Action, Actions, Kind, forward_actions, schedule_actions
from stagewright.schedules.rules import FIXED_SCHEDULES, PLACEMENTS, SCHEDULES


def drawn(actions: Actions) -> list[str]:
    return [" ".join(f"{one.kind.value}{one.microbatch}" for one in line) for line in actions]


def test_one_forward_one_backward_as_drawn() -> None:
    assert drawn(schedule_actions("1f1b", (0, 1, 2), 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_gpipe_as_drawn() -> None:
    assert drawn(schedule_actions("gpipe", (0, 1), 3)) == ["F0 F1 F2 B0 B1 B2"] * 2


def check(actions: Actions, num_stages: int, num_microbatches: int, *, training: bool = True) -> None:
    """Every action once, in an order in which nothing waits for ever."""
    done: set[tuple[Kind, int, int]] = set()
    queues = [list(line) for line in actions]

    def ready(action: Action) -> bool:
        if action.kind is Kind.BACKWARD_WEIGHT:
            return (Kind.BACKWARD_INPUT, action.stage, action.microbatch) in done
        before = [{Kind.FORWARD}] * action.stage  # what is done on each stage that the micro-batch passed
        if action.kind is not Kind.FORWARD:
            before = [{Kind.FORWARD}] * (action.stage + 1)
            before += [{Kind.BACKWARD, Kind.BACKWARD_INPUT}] * (num_stages - action.stage - 1)
        return all(
            any((kind, stage, action.microbatch) in done for kind in kinds) for stage, kinds in enumerate(before)
        )

    while any(queues):
        moved = False
        for queue in queues:
            while queue and ready(queue[0]):
                action = queue.pop(0)
                assert (action.kind, action.stage, action.microbatch) not in done
                done.add((action.kind, action.stage, action.microbatch))
                moved = True
        assert moved, "every worker waits"
    every = {(stage, number) for stage in range(num_stages) for number in range(num_microbatches)}
    assert {(stage, number) for kind, stage, number in done if kind is Kind.FORWARD} == every
    backward = [(stage, number) for kind, stage, number in done if kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)]
    assert sorted(backward) == (sorted(every) if training else [])


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", FIXED_SCHEDULES)
def test_every_schedule_is_complete_and_never_stuck(schedule: str, num_workers: int) -> None:
    rule = SCHEDULES[schedule]
    num_stages = num_workers * rule.stages_per_worker
    workers = PLACEMENTS[rule.placement](num_stages, num_workers)
    for count in (2 * num_workers, 4 * num_workers):
        for present in (count, count - 1, 1):
            check(schedule_actions(schedule, workers, count, present), num_stages, present)
        check(forward_actions(workers, count), num_stages, count, training=False)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=7), st.integers(1, 6), st.sampled_from(["gpipe", "1f1b"]))
def test_any_placement(raw: list[int], count: int, schedule: str) -> None:
    order: dict[int, int] = {}
    workers = tuple(order.setdefault(one, len(order)) for one in raw)
    check(schedule_actions(schedule, workers, count), len(workers), count)
    check(forward_actions(workers, count), len(workers), count, training=False)


def test_one_forward_one_backward_holds_few() -> None:
    """Stage i holds at most p - i micro-batches, also with more stages than workers."""
    for workers in [(0, 1, 2, 3), (0, 1, 0)]:
        for line in schedule_actions("1f1b", workers, 9):
            held: dict[int, int] = {}
            for action in line:
                held[action.stage] = held.get(action.stage, 0) + (1 if action.kind is Kind.FORWARD else -1)
                assert held[action.stage] <= len(workers) - action.stage


def test_what_torch_refuses_is_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"schedule 'dualpipev' can't run 1 micro-batches on 2 workers"):
        schedule_actions("dualpipev", (0, 1, 1, 0), 1)


def test_actions_read_as_text() -> None:
    action: Any = Action(Kind.BACKWARD_INPUT, 3, 7)
    assert str(action) == "3I7"
