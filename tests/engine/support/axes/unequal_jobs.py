"""Worker functions for tests of devices of different speeds, run by ``pool``."""

from __future__ import annotations

import dataclasses
from typing import Any

import fsdp_jobs
import torch
from expert_jobs import make_plan
from parity_jobs import checked_runner, example_of
from torch import nn

from jobs import context_of
from stagewright.engine.parallel.model import capture_for
from stagewright.engine.parallel.resolve import finalize_plan
from stagewright.errors import UsageError
from stagewright.zoo.model import Batch, Model


class Feed(nn.Module):
    """A feed-forward block with dropout and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(x))))


def make_model(name: str) -> Model:
    """Build a tiny transformer with dropout, or "mlp"."""
    if name != "mlp":
        return fsdp_jobs.make_model(name)
    torch.manual_seed(0)

    def make(count: int) -> Batch:
        generator = torch.Generator().manual_seed(count)
        target = torch.randint(0, 5, (count,), generator=generator)
        return Batch(args=(torch.randn(count, 8, generator=generator),), target=target)

    module = nn.Sequential(nn.Linear(8, 16), Feed(), Feed(), nn.Linear(16, 5))
    example = make(fsdp_jobs.BATCH)
    return Model(
        name=name,
        module=module,
        args=example.args,
        target=example.target,
        loss=torch.nn.functional.cross_entropy,
        batch_size=fsdp_jobs.BATCH,
        make_example=make,
    )


def parity(rank: int, name: str, mesh: str, **more: Any) -> dict[str, Any]:
    """Check the parity of a plan; return the samples of this worker's replica."""
    model = fsdp_jobs.make_model(name)
    model.module.train(more.get("training", True))
    plan = make_plan(mesh, model, **more)
    runner, report = checked_runner(rank, plan, model, mesh)
    context = context_of(rank, mesh)
    parts = runner.splitter.split(example_of(model), context.torch_device, context.data)
    return {"report": report, "samples": [part.num_samples for part in parts]}


def measured(rank: int, mesh: str, slower: float) -> dict[str, Any]:
    """Let the workers measure their speeds, with times of one worker multiplied."""
    import stagewright.engine.parallel.resolve as resolve

    model = fsdp_jobs.make_model("vit")
    plan = dataclasses.replace(make_plan(mesh, model), cuts=(), speeds="measured", microbatches=2)
    context, graph = context_of(rank, mesh), capture_for(plan, model)
    profile_here = resolve._profile_here

    def slow_profile(*args: Any) -> Any:
        profile = profile_here(*args)
        factor = (slower if rank else 1.0) / sum(unit.total_s for unit in profile.units)
        times = ("forward", "backward_input", "backward_weight")
        units = [
            dataclasses.replace(
                unit,
                **{time: dataclasses.replace(value, median_s=value.median_s * factor)
                   for time in times for value in [getattr(unit, time)]},
            )
            for unit in profile.units
        ]  # fmt: skip
        return dataclasses.replace(profile, units=tuple(units))

    resolve._profile_here = slow_profile
    try:
        final = finalize_plan(plan, model, graph, context)
    finally:
        resolve._profile_here = profile_here
    return {"speeds": final.speeds, "cuts": final.cuts, "calls": [call.name for call in graph.calls]}


def degrees(rank: int, name: str, mesh: str, *, float64: bool = False, **more: Any) -> dict[str, Any]:
    """Check the parity of a plan with a tensor degree for each stage; return which tied weights this worker sums."""
    model = make_model(name)
    if float64:
        model = dataclasses.replace(model, module=model.module.double())
    model.module.train(more.get("training", True))
    plan = make_plan(mesh, model, **more)
    runner, report = checked_runner(rank, plan, model, mesh)
    held = sum(parameter.numel() for parameter in runner.part.module.parameters())
    return {"report": report, "held": held, "bytes": runner.sync.allreduce_bytes}


def refused(rank: int, name: str, mesh: str, **more: Any) -> str:
    """Return why a plan can't be built, on this worker."""
    model = make_model(name)
    try:
        plan = make_plan(mesh, model, **more)
        checked_runner(rank, plan, model, mesh)
    except UsageError as error:
        return str(error)
    return ""
