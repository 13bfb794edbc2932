"""Worker functions for tests of devices of different speeds, run by ``pool``."""

from __future__ import annotations

import dataclasses
from typing import Any

import fsdp_jobs
from expert_jobs import make_plan
from parity_jobs import checked_runner, example_of

from jobs import context_of
from stagewright.engine.parallel.model import capture_for
from stagewright.engine.parallel.resolve import finalize_plan


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
