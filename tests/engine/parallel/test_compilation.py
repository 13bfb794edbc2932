"""Compiled stages and units pass the parity check against the eager baseline, under every kind of plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stagewright.cluster.device import usable_cores
from stagewright.engine.jobs.compare import run_plan
from stagewright.spec.plan import Mesh, ModelSpec, Plan

CORES = sorted(usable_cores())
PLAN = Plan(model=ModelSpec(name="digits-vit"), batch=8, steps=1, warmup=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options", "mode", "graphs"),
    [
        ("serial", {"compile": "stages"}, "stages", 1),
        ("pipeline=2", {"compile": "stages", "microbatches": 4, "schedule": "zbv"}, "stages", 4),
        ("pipeline=2", {"compile": "stages", "microbatches": 2, "recompute": "always"}, "stages", 2),
        ("serial", {"compile": "stages", "recompute": ("vit.layers.0", "vit.layers.2")}, "units", 4),
        ("data=2", {"compile": "stages", "shard": True}, "units", 8),
        ("tensor=2", {"compile": "units"}, "units", None),
    ],
)
def test_compiled_plans_match_the_eager_baseline(
    mesh: str, options: dict[str, Any], mode: str, graphs: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGEWRIGHT_COMPILE_BACKEND", "aot_eager")  # inductor's C++ compiler would take minutes
    shape = Mesh.parse(mesh)
    devices = tuple(f"cpu:{CORES[worker % len(CORES)]}" for worker in range(shape.num_workers))
    row = run_plan(replace(PLAN, mesh=shape, devices=devices, **options), tmp_path)
    assert row.equal, row.parity
    assert row.compiled is not None
    assert row.compiled.mode == mode
    if graphs is None:
        assert row.compiled.graph_breaks > 0  # at the layers that communicate
    else:
        assert (row.compiled.graphs, row.compiled.graph_breaks) == (graphs, 0)
