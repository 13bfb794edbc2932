"""What a plan recomputes: units by name, stages, and, without a pipeline, one block after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from stagewright.cli.options import parse_mode_or_units
from stagewright.errors import UsageError
from stagewright.spec.activation_checkpointing import (
    block_ends,
    check_recomputed_units,
    checkpoint_by_block,
    checkpoints_by_block,
    describe_recompute,
    recomputes_stages,
)
from stagewright.spec.plan import Mesh, ModelSpec, Plan
from stagewright.spec.plan_rules import check_plan

PLAN = Plan(model=ModelSpec(name="mlp-mnist"), batch=8, recompute="always")


@dataclass(frozen=True)
class Unit:
    name: str
    block: str | None


UNITS = [Unit("stem", None), Unit("0.a", "0"), Unit("0.b", "0"), Unit("1", "1"), Unit("2", "2"), Unit("head", None)]


def test_the_last_unit_of_each_block() -> None:
    assert block_ends(UNITS) == ["0.b", "1", "2"]


def test_a_plan_without_a_pipeline_is_cut_after_each_block_but_the_last() -> None:
    for plan in (PLAN, replace(PLAN, mesh=Mesh(data=2)), replace(PLAN, mesh=Mesh(tensor=2), recompute="except-last")):
        assert checkpoint_by_block(plan, block_ends(UNITS)).cuts == ("0.b", "1")


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": "none"},
        {"mesh": Mesh(pipeline=2), "microbatches": 4},
        {"mesh": Mesh(data=2), "shard": True},
        {"cuts": ("1",), "schedule": "interleaved"},
        {"training": False},
    ],
)
def test_other_plans_stay_as_they_are(changes: dict[str, object]) -> None:
    plan = replace(PLAN, **changes)  # type: ignore[arg-type]
    assert checkpoint_by_block(plan, block_ends(UNITS)) == plan


def test_a_model_without_repeated_blocks_stays_one_stage() -> None:
    assert checkpoint_by_block(PLAN, block_ends(UNITS[:2])) == PLAN


def test_tensor_parallel_plans_are_cut_only_on_request() -> None:
    assert checkpoints_by_block(PLAN)
    assert not checkpoints_by_block(replace(PLAN, mesh=Mesh(tensor=2)))


def test_units_by_name(tmp_path: Path) -> None:
    plan = Plan.of("digits-vit", 8, "pipeline=2", microbatches=2, recompute=("vit.layers.0", "vit.layers.3"))
    check_plan(plan)
    assert plan.recomputed_units == ("vit.layers.0", "vit.layers.3")
    assert not plan.recomputes(0)
    assert not recomputes_stages(plan)
    assert describe_recompute(plan) == "2 units"
    plan.write(tmp_path / "plan.toml")
    assert Plan.read(tmp_path / "plan.toml") == plan


def test_flags_and_modes_name_no_units() -> None:
    for recompute, shown in (("always", "always"), ((True, False), "(True, False)")):
        plan = Plan.of("digits-vit", 8, "pipeline=2", microbatches=2, recompute=recompute)
        assert plan.recomputed_units == ()
        assert plan.recomputes(0)
        assert recomputes_stages(plan)
        assert describe_recompute(plan) == shown


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        (("vit.layers.0", True), "names the unit 'vit.layers.0' and has flags"),
        (("vit.layers.0", "vit.layers.0"), "names the unit 'vit.layers.0' twice"),
        ((True,), "1 flags for 2 stages: give one for each stage, names of units"),
        ((), "0 flags for 2 stages"),
    ],
)
def test_wrong_lists(recompute: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_plan(Plan.of("digits-vit", 8, "pipeline=2", microbatches=2, recompute=recompute))


def test_unknown_unit() -> None:
    plan = Plan.of("digits-vit", 8, recompute=("vit.layer.0",))
    with pytest.raises(UsageError, match=r"unknown recomputed unit 'vit.layer.0'; did you mean 'vit.layers.0'"):
        check_recomputed_units(plan, ["vit.layers.0", "classifier"])


def test_option_of_the_command_line() -> None:
    assert parse_mode_or_units("except-last") == "except-last"
    assert parse_mode_or_units("vit.layers.0,vit.layers.1") == ("vit.layers.0", "vit.layers.1")
    assert parse_mode_or_units("table,") == ("table",)
