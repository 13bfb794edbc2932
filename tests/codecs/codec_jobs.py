"""Worker functions for the tests of codecs on links; the engine's ``pool`` imports them by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from stagewright.cluster.device import Device
from stagewright.engine.batch.splitter import BatchSplitter
from stagewright.engine.parallel import codec_choice
from stagewright.engine.parallel.model import capture_for, load_model
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.parallel.trainer import Trainer
from stagewright.engine.parity.baseline import make_baseline
from stagewright.engine.parity.check import baseline_of, check_parity
from stagewright.engine.worker.context import WorkerContext, make_context
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan
from stagewright.spec.plan_rules import check_plan
from stagewright.zoo.model import Batch

_contexts: dict[str, WorkerContext] = {}


def make_plan(mesh: str, model: str = "digits-vit", **more: Any) -> Plan:
    """Plan a small model, cut evenly."""
    plan = Plan(
        model=ModelSpec(name=model, **more.pop("model_options", {})), mesh=Mesh.parse(mesh), **{"batch": 12, **more}
    )
    probe = plan.model.load(batch=2)
    probe.module.train(plan.training)
    names = [call.name for call in capture_for(plan, probe).calls]
    count = plan.num_stages
    plan = dataclasses.replace(
        plan, cuts=tuple(names[round(len(names) * index / count) - 1] for index in range(1, count))
    )
    check_plan(plan)
    return plan


def context_of(rank: int, mesh: str) -> WorkerContext:
    if mesh not in _contexts:
        _contexts[mesh] = make_context(Mesh.parse(mesh), rank, Device.parse("cpu"))
    return _contexts[mesh]


def check_plan_parity(rank: int, mesh: str, **more: Any) -> dict[str, Any]:
    """Check parity under the same quantization; also return the sent bytes and the effect of the codecs."""
    plan = make_plan(mesh, **more)
    context = context_of(rank, mesh)
    model = load_model(plan, context)
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    graph = capture_for(plan, model)
    baseline = plain = None
    if rank == 0:
        parts = BatchSplitter(plan, model, graph).split(batch, context.torch_device)
        options: dict[str, Any] = {
            "training": plan.training, "seed": plan.seed, "device": context.torch_device,
            "deferred": plan.batch_norm == "deferred",
        }  # fmt: skip
        plain = make_baseline(graph, parts, model.loss, **options)
        baseline = baseline_of(plan, model, graph, context)
    runner = StepRunner(plan, model, context, graph)
    report = check_parity(runner, batch, baseline)
    outcome = runner.train_step(batch) if plan.training else runner.infer(batch)
    codec_effect = 0.0
    if plain is not None and baseline is not None:
        codec_effect = max(
            (float((gradient - baseline.gradients[name]).abs().max()) for name, gradient in plain.gradients.items()),
            default=0.0,
        )
        codec_effect = max(codec_effect, abs(plain.loss - baseline.loss))
    return {"equality": report.to_dict(), "sent_bytes": outcome.sent_bytes, "codec_effect": codec_effect}


def choose(rank: int, mesh: str, rate: float | None, **more: Any) -> tuple[Any, Any]:
    """Return the codecs that `auto` chooses on links of a given rate, or as measured."""
    plan = make_plan(mesh, **more)
    context = context_of(rank, mesh)
    model = load_model(plan, context)
    before = codec_choice._measure_link_rate
    if rate is not None:
        codec_choice._measure_link_rate = lambda context, sender, receiver, size: rate  # type: ignore[assignment]
    try:
        batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
        chosen = codec_choice.choose_codecs(plan, model, capture_for(plan, model), context, batch)
    finally:
        codec_choice._measure_link_rate = before
    check_plan(chosen)
    return chosen.codec, chosen.codec_backward


def train_and_resume(rank: int, mesh: str, folder: str, **more: Any) -> dict[str, Any]:
    """Train six steps with a checkpoint and an evaluation after four; resume with and without the codecs' state."""
    plan = make_plan(mesh, optimizer=OptimizerSpec(name="sgd", learning_rate=0.05), **more)
    context = context_of(rank, mesh)

    def trainer() -> Trainer:
        torch.manual_seed(0)
        return Trainer(plan, load_model(plan, context), context)

    first = trainer()
    batches = [first.model.example(plan.batch)] * 2
    losses, evaluated = [], []
    for step in range(6):
        losses.append(first.step(batches[step % 2]).loss)
        if step == 3:
            first.save(Path(folder) / "middle")
            before = {name: value.clone() for name, value in first.runner.codecs.state().items()}  # type: ignore[union-attr]
            evaluated.append(first.evaluate(batches[0]).loss)
            after = first.runner.codecs.state()  # type: ignore[union-attr]
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before)
    second = trainer()
    second.load(Path(folder) / "middle")
    evaluated.append(second.evaluate(batches[0]).loss)
    resumed = [second.step(batches[step % 2]).loss for step in (4, 5)]
    third = trainer()
    third.load(Path(folder) / "middle")
    third.runner.codecs.reset()  # type: ignore[union-attr]
    forgotten = [third.step(batches[step % 2]).loss for step in (4, 5)]
    return {
        "losses": losses, "resumed": resumed, "forgotten": forgotten, "evaluated": evaluated,
        "num_states": len(first.runner.codecs.state()),  # type: ignore[union-attr]
    }  # fmt: skip
