"""The same pipeline on stock ``torch.distributed.pipelining``: a job for the launcher, for ``pipeline_speedup.py``.

Stages are the ones that Stagewright builds, given static shapes; schedule, transport and buffers are torch's own.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _ScheduleForwardOnly

from stagewright.engine.job import load_model
from stagewright.engine.replica import capture_for, cut_indices


class Single(nn.Module):
    """A stage with one value in and one out."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.stage(value)[0]
        return result


def run_job(plan: Any, context: Any, run_folder: Any) -> None:
    model = load_model(plan, context)
    graph = capture_for(plan, model)
    cuts = cut_indices(graph, plan.cuts)
    size = plan.batch // plan.microbatches
    index = context.pipeline
    stage = Single(graph.stages(cuts)[index])
    flat = graph.flatten(model.args, model.kwargs)
    assert len(flat) == 1, "the comparison with stock torch is for models with one input"

    def example(cut: int) -> torch.Tensor:
        ((shape, dtype),) = graph.crossing_shapes(cuts[cut], size)
        return torch.zeros(shape, dtype=dtype, requires_grad=plan.training)

    last = index == plan.mesh.pipeline - 1
    inputs = flat[0][:size] if index == 0 else example(index - 1)
    outputs = stage(inputs).detach() if last else example(index)
    staged = PipelineStage(
        stage,
        index,
        plan.mesh.pipeline,
        context.torch_device,
        input_args=inputs,
        output_args=outputs,
        group=context.forward_group,
    )

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = nn.functional.cross_entropy(output, target)
        return value

    if plan.training:
        kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[plan.schedule]
        schedule: Any = kind(staged, plan.microbatches, loss_fn=loss)
    else:
        schedule = _ScheduleForwardOnly(staged, plan.microbatches)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)

    def step() -> None:
        args = (flat[0],) if index == 0 else ()
        if plan.training:
            optimizer.zero_grad()
            schedule.step(*args, **({"target": model.target} if last else {}))
            optimizer.step()
        else:
            with torch.no_grad():
                schedule.step(*args)

    step()
    seconds = []
    for _ in range(plan.steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    path = run_folder.worker(context.rank).path / "stock.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"step_s": statistics.median(seconds)}))
