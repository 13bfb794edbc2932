"""The order is that of the engine's actions, with its mailboxes' receives."""

from __future__ import annotations

import numpy as np
import pytest

from stagewright.engine.pipeline import transport
from stagewright.schedules.action_order import schedule_actions
from stagewright.schedules.rules import FIXED_SCHEDULES, PLACEMENTS, SCHEDULES
from stagewright.simulator.action_graph import AHEAD, IN_FLIGHT_BYTES, KINDS, training_graph


def test_as_many_receives_are_posted_as_in_the_engine() -> None:
    assert (AHEAD, IN_FLIGHT_BYTES) == (transport.AHEAD, transport.IN_FLIGHT_BYTES)


@pytest.mark.parametrize("schedule", FIXED_SCHEDULES)
def test_every_action_is_there_in_its_workers_order(schedule: str) -> None:
    rule, num_workers, m = SCHEDULES[schedule], 3, 6
    workers = PLACEMENTS[rule.placement](rule.stages_per_worker * num_workers, num_workers)
    order = training_graph(schedule, workers, m)
    start, end = order.times(np.where(order.is_p2p, 0.25, 1.0))
    for worker, actions in enumerate(schedule_actions(schedule, workers, m)):
        mine = np.flatnonzero(~order.is_p2p & (order.worker == worker))
        mine = mine[np.argsort(start[mine])]
        found = [(KINDS[order.kind[at]], order.stage[at], order.microbatch[at]) for at in mine]
        assert found == [(one.kind, one.stage, one.microbatch) for one in actions]
        assert (start[mine][1:] >= end[mine][:-1]).all()


def test_a_message_waits_for_its_receive() -> None:
    """A slow second stage of GPipe: the third message leaves when the first was taken, not when it was made."""
    order = training_graph("gpipe", (0, 1), 4)
    second = ~order.is_p2p & (order.stage == 1)
    start, _ = order.times(np.where(order.is_p2p, 0.5, np.where(second, 10.0, 1.0)))
    leaves = {int(order.microbatch[at]): start[at] for at in np.flatnonzero(order.is_p2p & (order.kind == 0))}
    # F0 ends at 1, arrives at 1.5 and is taken then; the third is made at 3 and was posted at 1.5;
    # the second is taken at 11.5, when stage 1 is free: the fourth, made at 4, leaves then.
    assert leaves == {0: 1.0, 1: 2.0, 2: 3.0, 3: 11.5}
