"""What a forecast says of a CPU's memory in an inference is what a run counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.planner.conftest import cluster_of

from stagewright.engine.jobs.compare import run_plan
from stagewright.machine.machine import default_devices
from stagewright.planner.costs.measure import measure_model
from stagewright.planner.forecast import prepare_plan, profiled_size
from stagewright.spec.plan import Mesh, ModelSpec, Plan


@pytest.mark.parametrize("mesh", [Mesh(pipeline=2), Mesh(data=2)], ids=str)
def test_a_run_counts_the_same(mesh: Mesh, tmp_path: Path) -> None:
    plan = Plan(
        model=ModelSpec(name="digits-vit"),
        batch=8,
        mesh=mesh,
        microbatches=4 if mesh.pipeline > 1 else 1,
        devices=default_devices(2, share=True),
        training=False,
        steps=1,
        warmup=0,
    )
    counted = run_plan(plan, tmp_path).peak_memory_bytes
    measured = measure_model(plan, size=profiled_size(plan)[0], repeats=1)
    workers = prepare_plan(plan, measured, cluster_of(2)).forecast().workers
    # Replicas are alike: one is forecast.
    assert [one.memory.counted_bytes for one in workers] == pytest.approx(counted[: len(workers)], rel=0.05)
