"""A perceptron with many activations near the kink of ReLU, under tensor parallelism, with and without faults."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from parity_jobs import example_of
from spoiled_steps import change_scale, drop_gradient, swap_microbatches
from torch import nn

from jobs import context_of
from stagewright.engine.parallel.model import capture_for, load_model
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.parity import float64_step
from stagewright.engine.parity.check import baseline_of, check_parity
from stagewright.engine.parity.float64_step import decide_in_float64
from stagewright.engine.tensor import axis
from stagewright.runs.result import ParityReport
from stagewright.spec.plan import Mesh, ModelSpec, Plan

PLAN = Plan(model=ModelSpec(name="kink_jobs:perceptron"), batch=512, microbatches=2, mesh=Mesh(tensor=2))
NEAR = 1e-6  # some activations are this small, while the rounding error of their sums is about 1e-7


def perceptron() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Two feed-forward layers; 8 features of the first's output nearly cancel in the second."""
    torch.manual_seed(0)
    first, second = ([nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)] for _ in range(2))
    with torch.no_grad():
        _, _, last = first
        assert isinstance(last, nn.Linear)
        last.weight[8:] = last.weight[:8] + NEAR * torch.randn(8, 64)
        last.bias[8:] = last.bias[:8]
        subtract = second[0]
        assert isinstance(subtract, nn.Linear)
        subtract.weight[:8] = torch.cat([torch.eye(8), -torch.eye(8)], 1)
        subtract.bias[:8] = 0
    return nn.Sequential(*first, *second), (torch.randn(512, 16),)


def scale_region_gradient(_runner: StepRunner) -> Any:
    """Make the gradient of every tensor-parallel region's input too large by a thousandth, in any dtype."""
    right = axis._CopyToRegion.backward

    def wrong(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 1.001 * right(ctx, gradient)[0], None

    return patch.object(axis._CopyToRegion, "backward", staticmethod(wrong))


SPOILS: dict[str, Callable[[StepRunner], Any]] = {
    "nothing": lambda _runner: None,
    "drop_gradient": drop_gradient,
    "swap_microbatches": swap_microbatches,
    "change_scale": change_scale,
    "scale_region_gradient": scale_region_gradient,
}


def no_kernel(_model: Any, *_: Any) -> nn.Module:
    """Fail as code that expects float32 does."""
    raise RuntimeError("no kernel for float64\nwith a second line")


OBSTACLES: dict[str, Callable[[int], Any]] = {
    "nothing": lambda _rank: nullcontext(),
    "no kernel": lambda _rank: patch.object(float64_step, "capture_for", no_kernel),
    "no kernel on worker 1": lambda rank: (
        patch.object(float64_step, "capture_for", no_kernel) if rank else nullcontext()
    ),
    "keeps float32": lambda _rank: patch.object(
        float64_step, "load_model", lambda plan, context, **_: load_model(plan, context)
    ),
    "little memory": lambda _rank: patch.object(float64_step, "available_bytes", lambda: 2048),
}
"""What keeps float64 from deciding."""


def check(rank: int, spoil: str, obstacle: str = "nothing") -> tuple[ParityReport, ParityReport]:
    """Return the report of float32 and the one that float64 decided."""
    context = context_of(rank, "tensor=2")
    model = load_model(PLAN, context)
    graph = capture_for(PLAN, model)
    model_bytes = sum(parameter.nbytes for parameter in model.module.parameters())
    baseline = baseline_of(PLAN, model, graph, context) if rank == 0 else None
    runner = StepRunner(PLAN, model, context, graph)
    patched = SPOILS[spoil](runner)
    if patched is not None:
        patched.start()
    try:
        report = check_parity(runner, example_of(model), baseline)
        with OBSTACLES[obstacle](rank):
            return report, decide_in_float64(PLAN, report, context, model_bytes)
    finally:
        if patched is not None:
            patched.stop()
