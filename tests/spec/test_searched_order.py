"""Plans of schedule "searched": what they store, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.errors import UsageError
from stagewright.spec import Plan, check_plan
from stagewright.spec.plan_file import read_plan, write_plan
from stagewright.spec.searched_order import lacks_order, layouts, require_order, splits_backward

ACTIONS = ("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1W0 1B1")
OPEN = Plan.of("mlp-mnist", 8, "pipeline=2", microbatches=2, schedule="searched")
ORDERED = replace(OPEN, actions=ACTIONS)


def test_a_plan_file_stores_the_order(tmp_path: Path) -> None:
    write_plan(ORDERED, tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml") == ORDERED


def test_a_plan_without_its_order_can_be_forecast_but_not_run() -> None:
    check_plan(OPEN)
    assert lacks_order(OPEN)
    with pytest.raises(UsageError, match="write the plan with `stagewright plan mlp-mnist --schedules searched -o"):
        require_order(OPEN)
    for plan in (ORDERED, replace(OPEN, training=False), Plan.of("mlp-mnist", 8, schedule="searched")):
        check_plan(plan)
        assert not lacks_order(plan)
        require_order(plan)


def test_an_order_suits_its_plan() -> None:
    with pytest.raises(
        UsageError, match='and the plan has schedule = "1f1b": leave out actions, or use schedule = "se'
    ):
        check_plan(replace(ORDERED, schedule="1f1b"))
    with pytest.raises(UsageError, match="as F and B, or as F, I and W, once each; its order has 0 F"):
        check_plan(replace(ORDERED, microbatches=4))
    with pytest.raises(UsageError, match="but holds stages 1"):
        check_plan(replace(ORDERED, actions=(ACTIONS[0], ACTIONS[0])))
    with pytest.raises(UsageError, match="worker 0 must run stage 2"):
        check_plan(replace(ORDERED, stages=4))


def test_only_a_worker_with_a_split_backward_counts_as_such() -> None:
    assert [splits_backward(ORDERED, worker) for worker in (0, 1)] == [False, True]
    assert splits_backward(replace(OPEN, schedule="zbv"), 0)


def test_layouts_that_a_plan_leaves_open() -> None:
    def described(plan: Plan, num_units: int) -> list[tuple[int, str]]:
        for layout in layouts(plan, num_units):
            check_plan(layout)
        return [(layout.num_stages, layout.resolved_placement) for layout in layouts(plan, num_units)]

    assert described(OPEN, 8) == [(2, "in-order"), (4, "in-order"), (4, "v")]
    assert described(OPEN, 3) == [(2, "in-order")]
    assert described(replace(OPEN, stages=2), 8) == [(2, "in-order")]
    assert described(replace(OPEN, cuts=("a", "b", "c")), 8) == [(4, "in-order"), (4, "v")]
    assert described(replace(OPEN, placement="v", stages=4), 8) == [(4, "v")]
