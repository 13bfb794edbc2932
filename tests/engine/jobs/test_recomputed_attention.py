"""`recompute = "attention"`: every strategy and schedule passes the parity check, with the memory of the forecast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.jobs.test_compare import on
from tests.engine.jobs.test_recomputed_units import num_recomputed

from stagewright.engine.jobs.compare import run_plan
from stagewright.errors import UsageError
from stagewright.planner.costs.measure import measure_model
from stagewright.planner.fit import peak_bytes
from stagewright.spec.plan import ModelSpec

NUM_LAYERS = 4


def recomputing(mesh: str, name: str, **options: Any) -> Any:
    model = ModelSpec(name=f"tests.engine.support.attention_models:{name}")
    return on(mesh, **{"recompute": "attention", "model": model, "batch": 8, **options})


@pytest.mark.parametrize(
    ("mesh", "name", "options"),
    [
        ("serial", "bert", {"microbatches": 2}),
        ("data=2", "llama", {"microbatches": 2}),
        ("data=2", "gpt2", {"shard": True, "microbatches": 2}),
        ("tensor=2", "llama", {"microbatches": 2}),
        ("tensor=2", "bert", {}),
        ("pipeline=2", "gpt2", {"microbatches": 4}),
        pytest.param("serial", "llama", {"precision": "bf16-mixed"}, marks=pytest.mark.slow),
        pytest.param("tensor=2", "gpt2", {}, marks=pytest.mark.slow),
        pytest.param("data=2", "bert", {"zero": 2, "microbatches": 2}, marks=pytest.mark.slow),
        pytest.param("tensor=2,pipeline=2", "llama", {"microbatches": 3}, marks=pytest.mark.slow),
        pytest.param("pipeline=2", "bert", {"microbatches": 4, "schedule": "gpipe"}, marks=pytest.mark.slow),
        pytest.param(
            "pipeline=2", "llama", {"microbatches": 4, "schedule": "zbv", "stages": 4}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_parity_with_baseline(mesh: str, name: str, options: dict[str, Any], tmp_path: Path) -> None:
    plan = recomputing(mesh, name, **options)
    row = run_plan(plan, tmp_path)
    assert row.equal, row.parity
    counts = [num_recomputed(str(row.run), worker) for worker in range(plan.mesh.pipeline)]
    assert sum(counts) == NUM_LAYERS * plan.microbatches, "each once per micro-batch, with a split backward too"


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_memory_of_the_forecast(name: str, tmp_path: Path) -> None:
    peaks = {}
    for mode in ("none", "attention"):
        plan = recomputing("serial", name, recompute=mode, microbatches=2)
        row = run_plan(plan, tmp_path)
        forecast = peak_bytes(plan, measure_model(plan, cache=False, repeats=1))
        peaks[mode] = max(row.peak_memory_bytes)
        assert forecast == pytest.approx(peaks[mode], rel=0.03)
    assert peaks["attention"] < 0.8 * peaks["none"]


def test_model_without_attention(tmp_path: Path) -> None:
    plan = on("serial", recompute="attention", model=ModelSpec(name="mlp-mnist"))
    with pytest.raises(UsageError, match="the units of mlp-mnist have none: name units in recompute"):
        run_plan(plan, tmp_path)


def test_refused_combinations(tmp_path: Path) -> None:
    for options, text in (
        ({"compile": "units"}, 'does not work with compile = "units"'),
        ({"sequence_parallel": True}, "does not work with sequence_parallel = true"),
    ):
        with pytest.raises(UsageError, match=text):
            run_plan(replace(recomputing("tensor=2", "llama"), **options), tmp_path)
