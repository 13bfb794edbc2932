"""What every parity test does in its workers: compare a plan with the baseline, and run one step more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from jobs import context_of
from stagewright.engine.parallel.model import capture_for
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.parallel.trainer import Trainer
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


def checked_traffic(
    rank: int, plan: Plan, model: Model, mesh: str, axis_of: Callable[[StepRunner], Any]
) -> tuple[StepRunner, ParityReport, int]:
    """Compare a plan with the baseline, run one step more, and return the bytes that it sent over an axis."""
    runner, report = checked_runner(rank, plan, model, mesh)
    axis = axis_of(runner)
    assert axis is not None
    axis.payload_bytes = 0
    run_step(runner, model)
    return runner, report, axis.payload_bytes


def compare_resumed(make: Callable[[bool], Trainer], batch: Batch, path: Path, before: bool, after: bool) -> float:
    """Train two steps, save, and train two more under another plan; return the difference to training on."""
    first, second = make(before), make(after)
    for _ in range(2):
        first.step(batch)
    first.save(path)
    second.load(path)
    for _ in range(2):
        losses = [float(trainer.step(batch).loss) for trainer in (first, second)]
    return abs(losses[0] - losses[1]) / losses[0]


def model_with_loss(name: str, module: nn.Module, batch: int, make: Callable[[int], Batch]) -> Model:
    """A model that computes its own loss from its keyword arguments."""
    return Model(
        name=name,
        module=module,
        args=(),
        kwargs=make(batch).kwargs,
        loss=lambda output, target: output["loss"],
        batch_size=batch,
        make_example=make,
    )


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
