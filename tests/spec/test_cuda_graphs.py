from __future__ import annotations

from typing import Any

import pytest

from stagewright.errors import UsageError
from stagewright.spec.plan import Plan
from stagewright.spec.plan_rules import check_plan


@pytest.mark.parametrize(
    ("mesh", "options", "named"),
    [
        ("data=2", {}, "data=2"),
        ("tensor=2", {}, "tensor=2"),
        ("data=2,pipeline=2", {"microbatches": 2}, "data=2,pipeline=2"),
        ("serial", {"recompute": "always"}, "recompute = 'always'"),
        ("serial", {"batch_norm": "deferred"}, 'batch_norm = "deferred"'),
        ("serial", {"devices": ("cpu:0",)}, r"devices = \['cpu:0'\]"),
    ],
)
def test_what_does_not_work_with_cuda_graphs(mesh: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=f"cuda_graphs = true .*{named}.*leave"):
        check_plan(Plan.of("mlp-mnist", 8, mesh, cuda_graphs=True, **options))


@pytest.mark.parametrize("mesh", ["serial", "pipeline=2"])
@pytest.mark.parametrize("compile", ["none", "stages"])
def test_serial_plans_and_pipelines_can_be_graphs(mesh: str, compile: Any) -> None:
    check_plan(Plan.of("mlp-mnist", 8, mesh, microbatches=4, cuda_graphs=True, compile=compile))
