"""Bytes of a forecast's links and collectives are those that a run of the plan counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.planner.conftest import cluster_of

from stagewright.engine.jobs.compare import run_plan
from stagewright.machine.machine import default_devices
from stagewright.planner.costs.measure import measure_model
from stagewright.planner.forecast import prepare_plan, profiled_size
from stagewright.spec.plan import Mesh, ModelSpec, Plan

CUTS = ("vit.layers.0", "vit.layers.1", "vit.layers.2")


@pytest.mark.parametrize(
    "fields",
    [
        {"mesh": Mesh(data=2), "shard": True, "recompute": "always"},  # gathered for each pass of each micro-batch
        {"mesh": Mesh(data=2)},
        {"mesh": Mesh(data=2), "zero": 1},
        {"mesh": Mesh(data=2), "zero": 2},
        {"mesh": Mesh(tensor=2), "recompute": "always"},
        {"mesh": Mesh(pipeline=2)},
        {"mesh": Mesh(tensor=2), "vocab_parallel": True, "recompute": "always"},  # the loss is not recomputed
    ],
    ids=lambda fields: str(fields["mesh"]) + (" sharded" if fields.get("shard") else f" zero {fields.get('zero', 0)}"),
)
def test_a_run_counts_the_same(fields: dict[str, Any], tmp_path: Path) -> None:
    is_divided = "vocab_parallel" in fields
    model = ModelSpec(name="llama-tiny", sequence_length=16) if is_divided else ModelSpec(name="digits-vit")
    plan = Plan(
        model=model, batch=8, microbatches=2, steps=1, warmup=0, devices=default_devices(2, share=True), **fields
    )
    run = run_plan(plan, tmp_path)
    events = pq.read_table(Path(str(run.run)) / "workers" / "0" / "events.parquet").to_pylist()
    counted: Counter[str] = Counter()
    for one in events:
        if one["step"] == 0 and one["kind"] == "collective" and one["note"] in ("data", "tensor"):
            counted[one["note"]] += one["bytes"] or 0
    measured = measure_model(plan, size=profiled_size(plan)[0], repeats=1)
    forecast = prepare_plan(plan, measured, cluster_of(2)).forecast()
    found = {one.axis: one for one in forecast.collectives if one.worker == 0}
    assert set(found) == set(counted)
    for axis, one in found.items():
        # Marks of parameters that were used, and rows that fill up shards, are no part of a forecast.
        assert one.num_bytes == pytest.approx(counted[axis], rel=0.01)
        is_sharded = plan.shard or plan.zero > 0
        assert one.sent_bytes == one.num_bytes // (2 if is_sharded else 1), "two workers: a half once, or twice"
    if plan.zero or plan.vocab_parallel:
        memory = forecast.workers[0].memory
        assert memory.optimizer_bytes == pytest.approx(run.memory[0].optimizer, rel=0.02)
        assert memory.counted_bytes == pytest.approx(run.peak_memory_bytes[0], rel=0.02)
    assert run.collective_bytes[0] == counted, "the table and the events"
    assert {str(one.edge): one.num_bytes for one in forecast.links} == run.link_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"mesh": Mesh(data=2), "fsdp_gather": "step"},
        {"mesh": Mesh(data=2), "training": False},
        {"mesh": Mesh(data=2), "recompute": "always"},
        {"mesh": Mesh(data=4), "fsdp_shards": 2, "microbatches": 2},
        {"mesh": Mesh(data=2, pipeline=2)},
        {"mesh": Mesh(data=2, pipeline=2), "recompute": "always"},
        {"mesh": Mesh(data=2, pipeline=2), "schedule": "zbv", "cuts": CUTS},
        {"mesh": Mesh(data=2, pipeline=2), "fsdp_gather": "microbatch"},
        {"mesh": Mesh(data=2, pipeline=2), "training": False},
    ],
    ids=lambda fields: "-".join(str(value) for key, value in fields.items() if key != "cuts"),
)
def test_fsdp_bytes_and_memory(fields: dict[str, Any], tmp_path: Path) -> None:
    """Parameters gathered once per step or in each pass, in training and inference, with and without a pipeline."""
    options = {"cuts": CUTS[1:2] if fields["mesh"].pipeline > 1 else (), **fields}
    devices = default_devices(fields["mesh"].num_workers, share=True)
    common = {"batch": 8, "microbatches": 4, "steps": 1, "warmup": 0, "devices": devices, "shard": True}
    plan = Plan(model=ModelSpec(name="digits-vit"), **{**common, **options})
    run = run_plan(plan, tmp_path)
    assert run.equal
    measured = measure_model(plan, size=profiled_size(plan)[0], repeats=1)
    forecast = prepare_plan(plan, measured, cluster_of(plan.mesh.num_workers)).forecast()
    for worker in range(plan.mesh.pipeline):
        found = {one.axis: one.num_bytes for one in forecast.collectives if one.worker == worker}
        assert found["data"] == pytest.approx(run.collective_bytes[worker]["data"], rel=0.02)
        memory = forecast.workers[worker].memory
        assert memory.optimizer_bytes == pytest.approx(run.memory[worker].optimizer, rel=0.02)
        assert memory.counted_bytes == pytest.approx(run.peak_memory_bytes[worker], rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"mesh": Mesh.parse("tensor=2:1")},
        {"mesh": Mesh.parse("tensor=1:2"), "recompute": "always"},
        {"mesh": Mesh.parse("tensor=1:2:1"), "schedule": "gpipe"},
        {"mesh": Mesh.parse("data=2,tensor=2:1"), "microbatches": 2},
        {"mesh": Mesh.parse("tensor=2:1"), "codec": "block8"},
        {"mesh": Mesh.parse("tensor=2:1"), "model": ModelSpec(name="gpt-layers:2", sequence_length=16)},
        {"mesh": Mesh.parse("tensor=2:1"), "training": False},
    ],
    ids=lambda fields: "-".join(getattr(value, "name", str(value)) for value in fields.values()),
)
def test_tensor_degrees_by_stage(fields: dict[str, Any], tmp_path: Path) -> None:
    """Each stage communicates and holds as with its degree everywhere; what crosses is sent to each of its workers."""
    devices = default_devices(fields["mesh"].num_workers, share=True)
    common = {"model": ModelSpec(name="digits-vit"), "batch": 8, "microbatches": 4, "steps": 1, "warmup": 0}
    plan = Plan(**{**common, "devices": devices, **fields})
    run = run_plan(plan, tmp_path)
    assert run.equal
    plan = replace(plan, cuts=run.cuts)
    measured = measure_model(plan, size=profiled_size(plan)[0], repeats=1)
    forecast = prepare_plan(plan, measured, cluster_of(plan.mesh.num_workers)).forecast()
    for worker in range(plan.mesh.pipeline):
        found = {one.axis: one.num_bytes for one in forecast.collectives if one.worker == worker}
        assert found == pytest.approx(run.collective_bytes[worker], rel=0.02)
        memory = forecast.workers[worker].memory
        tolerance = 0.03 if plan.training else 0.05
        assert memory.counted_bytes == pytest.approx(run.peak_memory_bytes[worker], rel=tolerance)
    assert {str(one.edge): one.num_bytes for one in forecast.links} == pytest.approx(run.link_bytes, rel=0.001)


def test_gathered_logits_of_inference(tmp_path: Path) -> None:
    """In inference, workers with a divided vocabulary all-gather the logits: one pass on a ring, not two."""
    plan = Plan(
        model=ModelSpec(name="llama-tiny", sequence_length=16),
        batch=4,
        microbatches=2,
        steps=1,
        warmup=0,
        training=False,
        mesh=Mesh(tensor=2),
        vocab_parallel=True,
        devices=default_devices(2, share=True),
    )
    run = run_plan(plan, tmp_path)
    measured = measure_model(plan, size=profiled_size(plan)[0], repeats=1)
    forecast = prepare_plan(plan, measured, cluster_of(2)).forecast()
    found = next(one for one in forecast.collectives if one.worker == 0)
    logits = 4 * 16 * 8192 * 4
    assert found.num_bytes == run.collective_bytes[0]["tensor"]
    assert found.sent_bytes == found.num_bytes - logits // 2
    assert forecast.workers[0].memory.counted_bytes == pytest.approx(run.peak_memory_bytes[0], rel=0.02)


@pytest.mark.parametrize(
    "fields",
    [
        {"mesh": Mesh(tensor=2)},
        {"mesh": Mesh(tensor=2), "recompute": "always"},
        {"mesh": Mesh(tensor=2), "training": False},
        {"mesh": Mesh(tensor=2, pipeline=2), "cuts": CUTS[1:2]},
    ],
    ids=lambda fields: "-".join(str(value) for key, value in fields.items() if key != "cuts"),
)
def test_divided_sequences(fields: dict[str, Any], tmp_path: Path) -> None:
    """Bytes and memory of a run; the bytes of tensor parallelism, less memory, and what stages divide and join."""
    devices = default_devices(fields["mesh"].num_workers, share=True)
    common = {"batch": 8, "microbatches": 2, "steps": 1, "warmup": 0, "devices": devices}
    whole = Plan(model=ModelSpec(name="digits-vit"), **{**common, **fields})
    plan = replace(whole, sequence_parallel=True)
    run = run_plan(plan, tmp_path)
    assert run.equal
    forecasts = []
    for one in (plan, whole):
        measured = measure_model(one, size=profiled_size(one)[0], repeats=1)
        forecasts.append(prepare_plan(one, measured, cluster_of(plan.mesh.num_workers)).forecast())
    forecast, without = forecasts
    for worker in range(plan.mesh.pipeline):
        found, before = (
            next(use for use in one.collectives if (use.worker, use.axis) == (worker, "tensor"))
            for one in (forecast, without)
        )
        assert found.num_bytes == pytest.approx(run.collective_bytes[worker]["tensor"], rel=0.02)
        hidden = 8 * 17 * 64 * 4
        ends = hidden * (2 if plan.training else 1) * (1.5 if plan.recompute == "always" else 1) / 2
        assert found.sent_bytes == pytest.approx(before.sent_bytes + ends, rel=0.02)
        memory, held = forecast.workers[worker].memory, without.workers[worker].memory
        assert memory.counted_bytes == pytest.approx(run.peak_memory_bytes[worker], rel=0.03)
        if plan.training:  # inference saves no activations
            assert memory.counted_bytes < held.counted_bytes
