"""A spoiled engine is caught in 16 bits too, even where noise and rounding raise every tolerance to the cap."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from spoiled_steps import change_scale, drop_gradient, swap_microbatches

from stagewright.cluster.device import Device
from stagewright.engine.parallel.model import capture_for, load_model
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.parity.check import baseline_of, check_parity
from stagewright.engine.worker.context import make_context
from stagewright.spec.plan import Mesh, ModelSpec, Plan
from stagewright.zoo.model import Batch

PLAN = Plan(model=ModelSpec(name="digits-vit"), batch=4, microbatches=2, devices=("cpu:0",))


CASES: list[tuple[Callable[[StepRunner], None], bool]] = [
    (lambda runner: None, True),
    (drop_gradient, False),
    (swap_microbatches, False),
    (change_scale, False),
]


def run_cases(precision: Any) -> None:
    """Check all cases; the caller runs this in a process of its own, as workers do."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for spoil, equal in CASES:
        plan = replace(PLAN, precision=precision)
        context = make_context(Mesh(), 0, Device.parse("cpu:0"))
        model = load_model(plan, context)
        graph = capture_for(plan, model)
        baseline = baseline_of(plan, model, graph, context)
        labels = ["loss", *(f"gradient of {name}" for name in baseline.gradients), "output 0 of micro-batch 0"]
        baseline.rounding_sensitivity = dict.fromkeys([*labels, "output 0 of micro-batch 1"], 1.0)
        runner = StepRunner(plan, model, context, graph)
        spoil(runner)
        report = check_parity(runner, Batch(args=model.args, kwargs=model.kwargs, target=model.target), baseline)
        assert report.equal is equal, (spoil, report)
        assert report.tolerance <= 0.1
    dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["bf16", "fp16-mixed"])
def test_spoiled_engine_is_caught(precision: str) -> None:
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    code = f"import sys; sys.path[:0] = {folders!r}; import test_spoiled_engine as t; t.run_cases({precision!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
