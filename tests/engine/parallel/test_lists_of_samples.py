"""Lists with an item for each sample, as detectors take them, are divided by items."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from stagewright.engine.jobs.compare import run_plan
from stagewright.engine.parallel.model import capture_for
from stagewright.errors import CaptureError
from stagewright.spec.plan import Mesh, ModelSpec, Plan

SUPPORT = Path(__file__).parents[1] / "support"
SIZES = [4, 5, 3, 7, 1]


def assert_equal(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert max(error for pair in result["errors"] for error in pair) < 1e-5
        assert result["worst"] < 1e-6


@pytest.mark.parametrize(
    ("kind", "mesh", "options"),
    [
        ("checking", "serial", {"microbatches": 2}),
        ("checking", "data=2", {}),
        ("checking", "data=2", {"shard": True, "microbatches": 2}),
        ("checking", "data=2", {"recompute": "always"}),
        ("detector", "data=2", {}),
        ("detector", "pipeline=2", {"microbatches": 2}),
    ],
)
def test_steps_equal_plain_torch(pool_of: Any, kind: str, mesh: str, options: dict[str, Any]) -> None:
    workers = 1 if mesh == "serial" else 2
    results = pool_of(workers).run("list_jobs:training", kind, mesh, SIZES, **options)
    assert_equal(results)
    assert results[0]["stages"] == (2 if mesh == "pipeline=2" else 1)


def test_a_user_loop(pool_of: Any) -> None:
    (serial,) = pool_of(1).run("list_jobs:user_loop", "serial")
    for result in pool_of(2).run("list_jobs:user_loop", "data=2"):
        assert result["losses"] == pytest.approx(serial["losses"], rel=1e-5)


@pytest.mark.parametrize(
    ("model", "mesh", "options"),
    [
        ("checking", "data=2", {"microbatches": 2}),
        ("checking", "data=2", {"training": False}),
        ("detector", "pipeline=2", {"microbatches": 2, "schedule": "gpipe"}),
        pytest.param("detector", "pipeline=2", {"microbatches": 3, "training": False}, marks=pytest.mark.long),
        pytest.param("dropping", "data=2", {"shard": True}, marks=pytest.mark.long),
        pytest.param("dropping", "pipeline=2", {"microbatches": 2}, marks=pytest.mark.long),
        pytest.param("dropping_alike", "pipeline=2", {"microbatches": 2}, marks=pytest.mark.long),
    ],
)
def test_parity(importable: None, tmp_path: Path, model: str, mesh: str, options: dict[str, Any]) -> None:
    shape = Mesh.parse(mesh)
    plan = Plan(
        model=ModelSpec(name=f"list_jobs:{model}"),
        mesh=shape,
        batch=5,
        steps=1,
        warmup=0,
        devices=("cpu:0",) * shape.num_workers,
        **options,
    )
    assert run_plan(plan, tmp_path).to_dict()["equality"]["equal"]


def test_a_model_that_can_not_be_cut_is_refused_with_a_way_out(importable: None) -> None:
    plan = Plan(model=ModelSpec(name="list_jobs:checking"), batch=4, mesh=Mesh(pipeline=2))
    with pytest.raises(CaptureError, match=r"can't capture Checking .*or run it without a cut: data=2"):
        capture_for(plan, plan.model.load(batch=4))


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SUPPORT))
    sys.modules.pop("list_jobs", None)
