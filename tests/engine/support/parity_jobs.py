"""What every parity test does in its workers: compare a plan with the baseline, and run one step more."""

from __future__ import annotations

from typing import Any

from jobs import context_of
from stagewright.engine.parallel.model import capture_for
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.parity.check import ParityReport, baseline_of, check_parity
from stagewright.spec.plan import Plan
from stagewright.zoo.model import Batch, Model


def checked_runner(rank: int, plan: Plan, model: Model, mesh: str) -> tuple[StepRunner, ParityReport]:
    """Return the runner of a plan, and how far it is from the baseline."""
    context = context_of(rank, mesh)
    graph = capture_for(plan, model)
    baseline = baseline_of(plan, model, graph, context) if rank == 0 else None
    runner = StepRunner(plan, model, context, graph)
    return runner, check_parity(runner, example_of(model), baseline)


def assert_parity(results: list[dict[str, Any]]) -> None:
    """Check the reports of all workers: within 1e-5 of the baseline."""
    for result in results:
        report = result["report"]
        assert report.equal, report
        assert max(report.loss, report.gradients, report.buffers, report.outputs, report.updates) <= 1e-5, report


def run_step(runner: StepRunner, model: Model) -> None:
    """Run one step of training or inference."""
    run = runner.train_step if runner.plan.training else runner.infer
    run(example_of(model))


def example_of(model: Model) -> Batch:
    return Batch(args=model.args, kwargs=model.kwargs, target=model.target)
