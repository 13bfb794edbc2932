"""The choice of a streamed baseline, and what refuses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stagewright.errors import UsageError
from stagewright.machine import host_memory
from stagewright.spec.host_memory_check import check_baseline, choose_baseline, num_parts
from stagewright.spec.plan import Mesh, ModelSpec, Plan
from stagewright.spec.plan_rules import check_plan
from stagewright.zoo.size import built_bytes

SIZE = built_bytes("digits-vit")
PLAN = Plan(
    model=ModelSpec(name="digits-vit", weights="folder"),
    batch=8,
    mesh=Mesh(pipeline=2),
    microbatches=2,
    baseline="auto",
)


def chosen(monkeypatch: pytest.MonkeyPatch, available: int | None, **changes: Any) -> str:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: available)
    return choose_baseline(replace(PLAN, **changes)).baseline


def test_chosen_where_the_host_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers hold three copies each in training, one in inference."""
    assert SIZE is not None
    assert chosen(monkeypatch, 6 * SIZE) == "auto"
    assert chosen(monkeypatch, 6 * SIZE - 1) == "streamed"
    assert chosen(monkeypatch, 2 * SIZE, training=False) == "auto"
    assert chosen(monkeypatch, 2 * SIZE - 1, training=False) == "streamed"
    assert chosen(monkeypatch, None) == "auto"


def test_chosen_where_the_device_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SIZE is not None
    assert chosen(monkeypatch, None, memory_bytes=SIZE) == "auto"
    assert chosen(monkeypatch, None, memory_bytes=SIZE - 1) == "streamed"


@pytest.mark.parametrize(
    "changes",
    [
        {"baseline": "whole"},
        {"model": ModelSpec(name="digits-vit")},
        {"codec": "block8"},
        {"batch_norm": "deferred"},
        {"task": "digits"},
    ],
)
def test_not_chosen(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    plan = replace(PLAN, **changes)
    assert chosen(monkeypatch, 1, **changes) == plan.baseline


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ModelSpec(name="digits-vit")}, r'baseline = "streamed", but the weights of digits-vit are not read'),
        ({"codec": "block8"}, r"but codec = 'block8' compresses .*; use baseline = \"whole\""),
        ({"batch_norm": "deferred"}, 'but batch_norm = "deferred" needs all micro-batches'),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    plan = replace(PLAN, baseline="streamed")
    check_baseline(plan)
    with pytest.raises(UsageError, match=message):
        check_plan(replace(plan, **changes))


def test_each_worker_reads_its_part() -> None:
    assert num_parts(PLAN) == 1
    assert num_parts(replace(PLAN, baseline="streamed")) == 2
    assert num_parts(replace(PLAN, baseline="streamed", mesh=Mesh(data=4), shard=True)) == 4
