"""Orders of actions from a file: what is missing, misplaced, or waits for ever is refused in one sentence."""

from __future__ import annotations

import re

import pytest

from stagewright.errors import UsageError
from stagewright.schedules.action_check import check_actions
from stagewright.schedules.action_order import format_actions, parse_actions, schedule_actions

GOOD = ("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1W0 1B1")


def test_a_mixed_order_is_valid() -> None:
    check_actions(parse_actions(GOOD), (0, 1), 2)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-zero-bubble"])
def test_text_and_actions_are_the_same(schedule: str) -> None:
    actions = schedule_actions(schedule, (0, 1, 0, 1), 4)
    check_actions(actions, (0, 1, 0, 1), 4)
    assert parse_actions(format_actions(actions)) == actions


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("0F0 0X1", ""), "'0X1' is not an action: write stage, kind (F, B, I or W) and micro-batch, like 0F3"),
        (GOOD[:1], "actions has 1 orders for 2 pipeline workers: give one for each worker"),
        (("1F0", GOOD[1]), "worker 0 runs 1F0, but holds stages 0: move the action"),
        (("0F0 0F1 0F2 0B0 0B1 0B2", GOOD[1]), "worker 0 runs 0F2, but the plan has micro-batches 0 to 1"),
        (("0F0 0F1 0B0", GOOD[1]), "stage 0 of micro-batch 1 as F and B, or as F, I and W, once each"),
        ((GOOD[0], "1F0 1I0 1F1 1B1"), "its order has 1 F, 0 B, 1 I and 0 W"),
        ((GOOD[0], "1F0 1F0 1B0 1F1 1B1"), "its order has 2 F, 1 B, 0 I and 0 W"),
        (("0F0 0B0 0B1 0F1", GOOD[1]), "the order deadlocks: worker 0 waits with 0B1, worker 1 waits with 1F1;"),
        ((GOOD[0], "1F0 1W0 1I0 1F1 1B1"), "the order deadlocks: worker 0 waits with 0B0, worker 1 waits with 1W0;"),
    ],
)
def test_what_is_refused(lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        check_actions(parse_actions(lines), (0, 1), 2)


def test_a_searched_order_is_repeated_and_cut_short() -> None:
    """A caller may give more micro-batches than the plan has, and the last batch may have fewer."""
    more = schedule_actions("searched", (0, 1), 4, 3, searched=GOOD)
    assert format_actions(more) == ("0F0 0F1 0B0 0B1 0F2 0B2", "1F0 1I0 1F1 1W0 1B1 1F2 1I2 1W2")
    check_actions(more, (0, 1), 3)
    assert format_actions(schedule_actions("searched", (0, 1), 2, 1, searched=GOOD)) == ("0F0 0B0", "1F0 1I0 1W0")
