"""Which messages pass between workers, and what an arrival tells."""

from __future__ import annotations

import pytest

from stagewright.engine.pipeline.transfers import Transfer, link_directions, plan_receives
from stagewright.schedules.actions import Action, Kind, schedule_actions
from stagewright.schedules.catalog import SCHEDULES

PLACES = {"1f1b": (0, 1, 2), "gpipe": (0, 1, 2), "interleaved": (0, 1, 0, 1), "zbv": (0, 1, 1, 0)}
PLACES |= {"dualpipev": (0, 1, 1, 0), "looped-bfs": (0, 1, 0, 1), "interleaved-zero-bubble": (0, 1, 0, 1)}


def test_every_schedule_has_a_place_here() -> None:
    assert set(PLACES) == set(SCHEDULES)


@pytest.mark.parametrize("schedule", PLACES)
def test_what_is_let_go_of_was_sent_before_and_taken_before_the_message_that_tells_it(schedule: str) -> None:
    workers = PLACES[schedule]
    actions = schedule_actions(schedule, workers, 4, 4)
    needs = [[True]] * (len(workers) - 1)
    told = set()
    for own in range(max(workers) + 1):
        found = plan_receives(actions, workers, own, needs)
        for message, gone in found.acknowledges.items():
            sender = workers[message.cut + message.backward]
            place = _place(actions[sender], message, makes=True)
            for one in gone:
                assert one not in told
                told.add(one)
                assert workers[one.cut + one.backward] == own
                assert _place(actions[sender], one, makes=False) <= place
    sent = {
        Transfer(cut, number, backward)
        for cut in range(len(workers) - 1)
        for number in range(4)
        for backward in (False, True)
        if workers[cut] != workers[cut + 1]
    }
    assert told < sent  # the last gradients of a step are waited for at its end
    assert {one for one in sent if not one.backward} <= told


@pytest.mark.parametrize("schedule", PLACES)
def test_a_receive_can_be_posted_before_it_is_needed_but_not_before_it_can_come(schedule: str) -> None:
    workers = PLACES[schedule]
    actions = schedule_actions(schedule, workers, 4, 4)
    early = 0
    for own in range(max(workers) + 1):
        found = plan_receives(actions, workers, own, [[True]] * (len(workers) - 1))
        for messages in found.orders.values():
            for message in messages:
                needed = _place(actions[own], message, makes=False)
                assert found.after[message] <= needed
                early += found.after[message] < needed
                for gone in found.acknowledges[message]:
                    assert found.after[message] > _place(actions[own], gone, makes=True)
    assert early


def test_a_message_waits_for_this_worker_over_others() -> None:
    """Worker 0 gets nothing from worker 2 before its own first stage is done, though worker 1 is between them."""
    workers = (0, 1, 2, 0, 1, 2)
    actions = schedule_actions("interleaved", workers, 3, 3)
    found = plan_receives(actions, workers, 0, [[True]] * 5)
    assert [found.after[Transfer(2, number, False)] for number in range(3)] == [1, 2, 3]


def _place(actions: tuple[Action, ...], message: Transfer, *, makes: bool) -> int:
    """Where in a worker's order this message is made, or taken."""
    stage = message.cut + (message.backward == makes)
    kinds = (Kind.BACKWARD, Kind.BACKWARD_INPUT) if message.backward else (Kind.FORWARD,)
    return next(
        at
        for at, one in enumerate(actions)
        if one.stage == stage and one.microbatch == message.microbatch and one.kind in kinds
    )


def test_a_gradient_tells_that_its_activation_has_arrived() -> None:
    actions = schedule_actions("1f1b", (0, 1), 2, 2)
    found = plan_receives(actions, (0, 1), 0, [[True]])
    assert found.orders == {(1, True): (Transfer(0, 0, True), Transfer(0, 1, True))}
    assert found.acknowledges[Transfer(0, 0, True)] == (Transfer(0, 0, False),)


def test_values_that_need_no_gradient_send_none_back() -> None:
    actions = schedule_actions("1f1b", (0, 1), 2, 2)
    assert plan_receives(actions, (0, 1), 0, [[False]]).orders == {}


def test_links_open_in_one_order_and_each_way_once() -> None:
    assert list(link_directions((0, 1, 2), backward=True)) == [(0, 1, False), (1, 0, True), (1, 2, False), (2, 1, True)]
    assert list(link_directions((0, 1, 1, 0), backward=False)) == [(0, 1, False), (1, 0, False)]
    assert list(link_directions((0, 1, 2, 3), backward=False)) == [(0, 1, False), (2, 3, False), (1, 2, False)]
