"""The start of a benchmark's job: a worker's part of a plan, verified against the single-device baseline."""

from __future__ import annotations

from typing import Any

from stagewright.engine.parallel.model import capture_for, load_model
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.parity.check import baseline_of, check_parity
from stagewright.runs.result import ParityReport
from stagewright.zoo.model import Batch


def verified_runner(plan: Any, context: Any) -> tuple[StepRunner, Batch, ParityReport]:
    """Return this worker's part, the batch, and the result of the parity check."""
    model = load_model(plan, context)
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    graph = capture_for(plan, model)
    baseline = baseline_of(plan, model, graph, context) if context.rank == 0 else None
    runner = StepRunner(plan, model, context, graph)
    return runner, batch, check_parity(runner, batch, baseline)
