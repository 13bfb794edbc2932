"""P2P transfers between workers, and what an arrival implies."""

from __future__ import annotations

import pytest

from stagewright.engine.pipeline.transfers import Transfer, link_directions, plan_receives
from stagewright.schedules.action_order import Action, Kind, schedule_actions
from stagewright.schedules.rules import FIXED_SCHEDULES

PLACES = {"1f1b": (0, 1, 2), "gpipe": (0, 1, 2), "interleaved": (0, 1, 0, 1), "zbv": (0, 1, 1, 0)}
PLACES |= {"dualpipev": (0, 1, 1, 0), "looped-bfs": (0, 1, 0, 1), "interleaved-zero-bubble": (0, 1, 0, 1)}


def test_every_schedule_is_covered() -> None:
    assert set(PLACES) == set(FIXED_SCHEDULES)


@pytest.mark.parametrize("schedule", PLACES)
def test_acknowledged_transfers_were_received_before(schedule: str) -> None:
    workers = PLACES[schedule]
    actions = schedule_actions(schedule, workers, 4, 4)
    needs = [[True]] * (len(workers) - 1)
    acknowledged = set()
    for worker in range(max(workers) + 1):
        receives = plan_receives(actions, workers, worker, needs)
        for transfer, acknowledged_transfers in receives.acknowledges.items():
            sender = workers[transfer.cut + transfer.backward]
            position = _position(actions[sender], transfer, makes=True)
            for other_transfer in acknowledged_transfers:
                assert other_transfer not in acknowledged
                acknowledged.add(other_transfer)
                assert workers[other_transfer.cut + other_transfer.backward] == worker
                assert _position(actions[sender], other_transfer, makes=False) <= position
    sent = {
        Transfer(cut, number, backward)
        for cut in range(len(workers) - 1)
        for number in range(4)
        for backward in (False, True)
        if workers[cut] != workers[cut + 1]
    }
    assert acknowledged < sent  # the last gradients of a step are waited for at its end
    assert {other_transfer for other_transfer in sent if not other_transfer.backward} <= acknowledged


@pytest.mark.parametrize("schedule", PLACES)
def test_receives_are_posted_early_but_not_too_early(schedule: str) -> None:
    workers = PLACES[schedule]
    actions = schedule_actions(schedule, workers, 4, 4)
    num_early = 0
    for worker in range(max(workers) + 1):
        receives = plan_receives(actions, workers, worker, [[True]] * (len(workers) - 1))
        for order in receives.orders.values():
            for transfer in order:
                needed = _position(actions[worker], transfer, makes=False)
                assert receives.after[transfer] <= needed
                num_early += receives.after[transfer] < needed
                for acknowledged_transfers in receives.acknowledges[transfer]:
                    assert receives.after[transfer] > _position(actions[worker], acknowledged_transfers, makes=True)
    assert num_early


def test_dependencies_through_other_workers() -> None:
    """Worker 0 receives nothing from worker 2 before its first stage is done, with worker 1 in between."""
    workers = (0, 1, 2, 0, 1, 2)
    actions = schedule_actions("interleaved", workers, 3, 3)
    receives = plan_receives(actions, workers, 0, [[True]] * 5)
    assert [receives.after[Transfer(2, number, False)] for number in range(3)] == [1, 2, 3]


def _position(actions: tuple[Action, ...], transfer: Transfer, *, makes: bool) -> int:
    """Return the index of the action that produces a transfer, or consumes it."""
    stage = transfer.cut + (transfer.backward == makes)
    kinds = (Kind.BACKWARD, Kind.BACKWARD_INPUT) if transfer.backward else (Kind.FORWARD,)
    return next(
        index
        for index, action in enumerate(actions)
        if action.stage == stage and action.microbatch == transfer.microbatch and action.kind in kinds
    )


def test_a_gradient_acknowledges_its_activation() -> None:
    actions = schedule_actions("1f1b", (0, 1), 2, 2)
    receives = plan_receives(actions, (0, 1), 0, [[True]])
    assert receives.orders == {(1, True): (Transfer(0, 0, True), Transfer(0, 1, True))}
    assert receives.acknowledges[Transfer(0, 0, True)] == (Transfer(0, 0, False),)


def test_tensors_without_gradient_send_nothing_back() -> None:
    actions = schedule_actions("1f1b", (0, 1), 2, 2)
    assert plan_receives(actions, (0, 1), 0, [[False]]).orders == {}


def test_links_open_once_per_direction_in_one_order() -> None:
    assert list(link_directions((0, 1, 2), backward=True)) == [(0, 1, False), (1, 0, True), (1, 2, False), (2, 1, True)]
    assert list(link_directions((0, 1, 1, 0), backward=False)) == [(0, 1, False), (1, 0, False)]
    assert list(link_directions((0, 1, 2, 3), backward=False)) == [(0, 1, False), (2, 3, False), (1, 2, False)]
