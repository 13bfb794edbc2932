"""What the jobs of benchmarks begin with: a worker's part of a plan, proven equal to serial."""

from __future__ import annotations

from typing import Any

from stagewright.engine.parallel.model import load_model
from stagewright.engine.parallel.model import capture_for
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.parity.check import baseline_of, check_parity
from stagewright.runs.result import ParityReport
from stagewright.zoo.model import Batch


def proven_replica(plan: Any, context: Any) -> tuple[StepRunner, Batch, ParityReport]:
    """This worker's part, the batch, and what the proof found."""
    model = load_model(plan, context)
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    graph = capture_for(plan, model)
    baseline = baseline_of(plan, model, graph, context) if context.rank == 0 else None
    runner = StepRunner(plan, model, context, graph)
    return runner, batch, check_parity(runner, batch, baseline)
