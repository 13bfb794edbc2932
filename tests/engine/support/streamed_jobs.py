"""Whole and streamed baselines of small models with weights in files, and plans that are compared with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parity_jobs import example_of
from spoiled_steps import change_scale, drop_gradient, swap_microbatches

from jobs import context_of
from stagewright.engine.batch.splitter import BatchSplitter
from stagewright.engine.parallel.model import capture_for, load_model
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.parity.baseline import Baseline, make_baseline
from stagewright.engine.parity.check import baseline_of, check_parity
from stagewright.engine.parity.relative_error import name_outputs, relative_error, scales
from stagewright.engine.parity.streamed import stream_baseline
from stagewright.runs.result import ParityReport
from stagewright.spec.plan import Mesh, ModelSpec, Plan

SPOILS: dict[str, Any] = {
    "nothing": lambda _runner: None,
    "drop_gradient": drop_gradient,
    "swap_microbatches": swap_microbatches,
    "change_scale": change_scale,
}


def spec_of(folder: str) -> ModelSpec:
    """Return a model of a folder; texts are short, images small."""
    is_image = "resnet" in Path(folder).name
    return ModelSpec(name=f"hf:{folder}", **({"image_size": 32} if is_image else {"sequence_length": 6}))  # type: ignore[arg-type]


def compare_baselines(rank: int, folder: str, spool: str, dtype: str, training: bool) -> dict[str, Any]:
    """Return the largest errors of the streamed baseline over two replicas of two micro-batches each."""
    plan = Plan(model=spec_of(folder), batch=8, microbatches=2, mesh=Mesh(data=2), training=training)
    context = context_of(rank, "serial")
    options: Any = {"training": training, "seed": 3, "device": context.torch_device}
    baselines: list[Baseline] = []
    for hollow in (False, True):
        model = load_model(plan, context, hollow=hollow, dtype=dtype)
        graph = capture_for(plan, model)
        microbatches = BatchSplitter(plan, model, graph).split(example_of(model), context.torch_device)
        if model.weights is None:
            baselines.append(make_baseline(graph, microbatches, model.loss, deferred=False, **options))
        else:
            baselines.append(stream_baseline(graph, model.weights, microbatches, model.loss, Path(spool), **options))
            for parameter in model.module.parameters():  # it is hollow again
                assert parameter.grad is None
                assert parameter.untyped_storage().nbytes() == parameter.element_size()
    whole, streamed = baselines
    return {
        "is_streamed": (whole.is_streamed, streamed.is_streamed),
        "num_gradients": len(streamed.gradients),
        "num_changed": len(streamed.changed),
        "same_changes": whole.changed == streamed.changed,
        "loss": abs(whole.loss - streamed.loss) / whole.loss_scale,
        "gradients": _error(streamed.gradients, whole.gradients, by_module=True),
        "buffers": _error(streamed.buffers, whole.buffers),
        "outputs": _error(*(name_outputs(dict(enumerate(baseline.outputs))) for baseline in (streamed, whole))),
    }


def check(rank: int, folder: str, spool: str, mesh: str, spoil: str, options: dict[str, Any]) -> ParityReport:
    """Compare a plan, whose workers read their parts from files, with the streamed baseline."""
    plan = Plan(
        model=spec_of(folder), batch=8, microbatches=2, mesh=Mesh.parse(mesh), baseline="streamed", clip=0.5, **options
    )
    context = context_of(rank, mesh)
    model = load_model(plan, context, hollow=True)
    graph = capture_for(plan, model)
    baseline = baseline_of(plan, model, graph, context, folder=Path(spool)) if rank == 0 else None
    runner = StepRunner(plan, model, context, graph)
    SPOILS[spoil](runner)
    return check_parity(runner, example_of(model), baseline, folder=Path(spool, f"worker-{rank}"))


def _error(values: Any, expected: Any, *, by_module: bool = False) -> float:
    assert set(values) == set(expected)
    sizes = scales(expected, by_module=by_module)
    return max((relative_error(values[name], expected[name], sizes[name]) for name in expected), default=0.0)
