"""Memory and time of plans that recompute units are those of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.planner.conftest import cluster_of

from stagewright.engine.jobs.compare import run_plan
from stagewright.machine.machine import default_devices
from stagewright.planner.costs.measure import measure_model
from stagewright.planner.forecast import prepare_plan, profiled_size
from stagewright.spec.plan import Mesh, ModelSpec, Plan

VIT, LLAMA = ModelSpec(name="digits-vit"), ModelSpec(name="llama-tiny", sequence_length=16, padded=True)


@pytest.mark.parametrize(
    ("model", "fields", "units"),
    [
        (VIT, {}, ("vit.layers.0", "vit.layers.3")),
        (VIT, {"mesh": Mesh(pipeline=2), "cuts": ("vit.layers.1",)}, ("vit.layers.0", "vit.layers.2", "vit.layers.3")),
        pytest.param(VIT, {"mesh": Mesh(tensor=2)}, ("vit.layers.1", "vit.layers.2"), marks=pytest.mark.slow),
        pytest.param(VIT, {"mesh": Mesh(data=2), "shard": True}, ("vit.layers.1",), marks=pytest.mark.slow),
        pytest.param(LLAMA, {}, ("model.layers.1", "model.layers.2", "model.layers.6"), marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value.get("mesh", "serial")) if isinstance(value, dict) else None,
)
def test_memory_and_bytes(model: ModelSpec, fields: dict[str, Any], units: tuple[str, ...], tmp_path: Path) -> None:
    mesh = fields.get("mesh", Mesh())
    devices = default_devices(mesh.num_workers, share=True)
    common = {"batch": 32, "microbatches": 4, "steps": 1, "warmup": 0, "devices": devices}
    plan = Plan(model=model, recompute=units, **{**common, **fields})
    run = run_plan(plan, tmp_path)
    assert run.equal, run.parity
    measured = measure_model(plan, size=profiled_size(plan)[0], repeats=1)
    prepared = prepare_plan(plan, measured, cluster_of(mesh.num_workers))
    forecast = prepared.forecast()
    for worker in range(mesh.pipeline):
        memory = forecast.workers[worker].memory
        assert memory.counted_bytes == pytest.approx(run.peak_memory_bytes[worker], rel=0.03)
        if not plan.shard:  # with FSDP, the peak is where parameters are gathered
            assert memory.activations_bytes == pytest.approx(run.memory[worker].activations, rel=0.03)
    for use in forecast.collectives:
        assert use.num_bytes == pytest.approx(run.collective_bytes[use.worker][use.axis], rel=0.02)
    none = prepare_plan(replace(plan, recompute="none"), measured, cluster_of(mesh.num_workers))
    forward_s = sum(unit.forward.median_s for unit in measured.profile.units if unit.name in units)
    scale = none.costs.stages[0].forward_s / sum(
        unit.forward.median_s for unit in measured.profile.units[: none.costs.stages[0].last + 1]
    )
    recompute_s = sum(forecast.workers[worker].recompute_s for worker in range(mesh.pipeline))
    assert recompute_s == pytest.approx(sum(prepared.costs.shares) * forward_s * scale, rel=1e-6)
    assert forecast.step_s > none.forecast().step_s
