"""`optimizer_in_backward = true`: parity of gradients and optimizer steps, and the memory of the forecast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.jobs.test_compare import on

from stagewright.engine.jobs.compare import run_plan
from stagewright.planner.costs.measure import measure_model
from stagewright.planner.fit import peak_bytes
from stagewright.spec.plan import ModelSpec, OptimizerSpec

TIED = ModelSpec(name="gpt-layers:2", sequence_length=16)


def stepping(mesh: str, **options: Any) -> Any:
    return on(mesh, **{"microbatches": 1, "optimizer_in_backward": True, **options})


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("serial", {}),
        ("serial", {"recompute": "always"}),  # one stage per block
        ("tensor=2", {"recompute": "attention"}),
        ("pipeline=2", {"schedule": "gpipe", "optimizer": OptimizerSpec(name="sgd", momentum=0.9)}),
        pytest.param(
            "serial", {"model": ModelSpec(name="gpt-layers:2", sequence_length=16), "batch": 2}, marks=pytest.mark.slow
        ),
        pytest.param(
            "pipeline=2",
            {"model": ModelSpec(name="gpt-layers:2", sequence_length=16), "batch": 2, "schedule": "gpipe"},
            marks=pytest.mark.slow,
        ),  # tied embedding and head, stepped after the backward
        pytest.param("tensor=2", {"sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param("serial", {"recompute": ("vit.layers.0",), "precision": "bf16-mixed"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_parity_with_baseline(mesh: str, options: dict[str, Any], tmp_path: Path) -> None:
    row = run_plan(stepping(mesh, **options), tmp_path)
    assert row.equal, row.parity
    assert row.parity.updates <= row.parity.tolerance


ALL = ("vit.layers.0", "vit.layers.1", "vit.layers.2", "vit.layers.3")


@pytest.mark.parametrize(("recompute", "share"), [("none", 0.5), (ALL, 0.8)])
def test_memory_falls_by_the_gradients(recompute: Any, share: float, tmp_path: Path) -> None:
    """Without it, the peak is at the end of backward, where all gradients exist; with it, where all activations do."""
    peaks = {}
    for in_backward in (False, True):
        plan = replace(stepping("serial", batch=1, recompute=recompute), optimizer_in_backward=in_backward)
        row = run_plan(plan, tmp_path)
        peaks[in_backward] = max(row.peak_memory_bytes)
        forecast = peak_bytes(plan, measure_model(plan, cache=False, repeats=1))
        assert forecast == pytest.approx(peaks[in_backward], rel=0.03)
    gradients = row.memory[0].parameters
    assert peaks[False] - peaks[True] > share * gradients
