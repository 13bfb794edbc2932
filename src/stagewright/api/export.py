"""``sw.export``: a plan as the configuration of another trainer."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from stagewright.errors import UsageError
from stagewright.exporters.catalog import export_plan
from stagewright.exporters.config import ExportedConfig, ExportInput
from stagewright.spec.plan import Plan
from stagewright.spec.plan_file import read_plan


def export(plan: Plan | str | Path, to: str) -> ExportedConfig:
    """Return a plan as the configuration of another trainer, with the same stages.

    The model is built and captured once, to list the modules of each stage. What the trainer can't express is listed in
    ``omitted``.

    Args:
        plan: A resolved plan, or the path of its file.
        to: torchtitan, megatron, accelerate, deepspeed or torchrun.

    Example:
        config = sw.export(sw.Plan.of("mlp-mnist", 64, "data=2"), to="deepspeed")
        print(config)
    """
    path = "plan.toml" if isinstance(plan, Plan) else str(plan)
    value = plan if isinstance(plan, Plan) else read_plan(Path(plan))
    return export_plan(ExportInput(plan=value, stages=stage_units(value), plan_path=path), to)


def stage_units(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Return the names of the units of each stage of a plan."""
    from stagewright.engine.parallel.model import CAPTURED_SAMPLES, capture_for, cut_indices

    if plan.num_stages > 1 and not plan.cuts:
        raise UsageError("the plan names no cuts; export one that `stagewright plan` wrote, or name its cuts")
    model = plan.model.load(batch=min(plan.batch, CAPTURED_SAMPLES), dtype=plan.dtype)
    model.module.train(plan.training)
    graph = capture_for(plan, model)
    names = [call.name for call in graph.calls]
    ends = [cut + 1 for cut in cut_indices(graph, plan.cuts)]
    return tuple(tuple(names[first:last]) for first, last in pairwise([0, *ends, len(names)]))
