"""Without a pipeline, activation checkpointing works block by block."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from stagewright.spec.activation_checkpointing import block_ends, checkpoint_by_block, checkpoints_by_block
from stagewright.spec.plan import Mesh, ModelSpec, Plan

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
