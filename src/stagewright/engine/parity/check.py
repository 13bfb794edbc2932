"""The parity check of a plan: run the same step several times and compare each with the single-device baseline.

worker 0: plain model ─► Baseline        every worker: step, compare, restore; the last one with its optimizer step
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stagewright import structure
from stagewright.engine.batch.microbatch import MicroBatch
from stagewright.engine.batch.precision import autocast_of
from stagewright.engine.batch.splitter import BatchSplitter
from stagewright.engine.parallel.loss_scale import INITIAL_SCALE, PARITY_SCALE
from stagewright.engine.parallel.model import cut_indices, input_dims
from stagewright.engine.parallel.optimizer import MakeOptimizer, make_optimizer
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.parity.baseline import Baseline, make_baseline, running_statistics
from stagewright.engine.parity.comparison import compare_with_baseline
from stagewright.engine.parity.optimizer_step import compare_optimizer_step, step_in_backward
from stagewright.engine.parity.relative_error import equal_or_nan
from stagewright.engine.parity.streamed import stream_baseline
from stagewright.engine.parity.tolerances import (
    TOLERANCES,
    choose_perturbation,
    full_precision,
    is_nondeterministic,
    measure_noise,
    measure_sensitivity,
)
from stagewright.engine.parity.whole_batch import compare_whole_batch
from stagewright.engine.pipeline.config import PipelineResult
from stagewright.engine.pipeline.link_codec import fake_link_codecs
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity
from stagewright.errors import UsageError
from stagewright.graph.unit_graph import UnitGraph
from stagewright.machine.cpu_offload import offloaded
from stagewright.runs.result import ParityReport, WholeBatchLoss
from stagewright.spec.plan import Mesh, Plan
from stagewright.zoo.model import Batch, Model


def baseline_of(
    plan: Plan,
    model: Model,
    graph: UnitGraph,
    context: WorkerContext,
    *,
    exact: bool = False,
    folder: Path | None = None,
) -> Baseline:
    """Run the plan's single-device baseline on this worker's device, over the plan's micro-batches.

    ``exact``: the model is in float64, so noise and rounding sensitivity are not measured. ``folder``: for the
    gradients of a hollow model, which is streamed; noise and rounding sensitivity are not measured either.
    """
    activity.begin("single-device baseline")
    links, cuts = fake_link_codecs(plan), cut_indices(graph, plan.cuts)
    microbatches = BatchSplitter(plan, model, graph).split(_example(model), context.torch_device)
    options: dict[str, Any] = {
        "training": plan.training,
        "seed": plan.seed,
        "device": context.torch_device,
        "plain_attention": plan.mesh.size("tensor") > 1,
        "autocast": functools.partial(autocast_of, plan, context.torch_device),
        "loss_scale": PARITY_SCALE if plan.training and plan.precision == "fp16-mixed" else 1.0,
    }
    if model.weights is not None:
        assert folder is not None, "a hollow model is streamed"
        with full_precision():
            return stream_baseline(graph, model.weights, microbatches, model.loss, folder, **options)
    options |= {"deferred": plan.batch_norm == "deferred", "has_lists": bool(input_dims(model).lists)}
    make = functools.partial(make_baseline, graph, microbatches, model.loss, **options)
    with offloaded(model.module, context.torch_device), full_precision():
        try:
            baseline = make(cuts=cuts, links=links)
        except (IndexError, KeyError, TypeError, ValueError) as error:  # in the model's own code
            raise UsageError(_describe_failure(error, model, microbatches)) from error
        if exact:
            return baseline
        allowed: Counter[str] = Counter()
        if is_nondeterministic(context.torch_device):
            allowed.update(measure_noise(make(cuts=cuts, links=links), baseline))
        perturbed = choose_perturbation(plan, model, graph, links, cuts)
        if perturbed is not None:
            allowed.update(measure_sensitivity(make(**perturbed), baseline))
        baseline.rounding_sensitivity = dict(allowed)
    return baseline


def _describe_failure(error: Exception, model: Model, microbatches: Sequence[MicroBatch]) -> str:
    """Return why the model fails by itself on the plan's micro-batches, and a way out."""
    sizes = sorted({microbatch.num_samples for microbatch in microbatches})
    first = str(error).strip().partition("\n")[0]
    return (
        f"{type(model.module).__name__} fails by itself on {' and '.join(map(str, sizes))} samples, before it is "
        f"parallelized ({type(error).__name__}: {first}); if its rows are no samples, as the nodes of a graph, give as "
        "many as the example has (--batch), and a strategy that does not divide them: serial, or a pipeline with "
        "--schedule gpipe --microbatches 1"
    )


def whole_batch_of(
    plan: Plan, model: Model, graph: UnitGraph, context: WorkerContext, baseline: Baseline
) -> WholeBatchLoss | None:
    """Compare the loss of the undivided batch with that of the plan's micro-batches; None if not applicable.

    A stand-in loss is skipped: it does not depend on samples. So is a streamed baseline, whose model is never whole.
    """
    if baseline.is_streamed:
        return None
    device = context.torch_device
    microbatches = BatchSplitter(plan, model, graph).split(_example(model), device)
    if len(microbatches) == 1 or baseline.loss_source == "stand-in":
        return None
    activity.begin("loss of the whole batch")
    undivided = dataclasses.replace(plan, mesh=Mesh(), microbatches=1)
    (whole,) = BatchSplitter(undivided, model, graph).split(_example(model), device)
    coded = any(codec != "none" for link in fake_link_codecs(plan) for codec in link)
    with offloaded(model.module, device), full_precision(), autocast_of(plan, device):
        return compare_whole_batch(
            model.module,
            microbatches,
            whole,
            model.loss,
            known_loss=None if coded else baseline.loss,
            dtype=plan.compute_dtype,
            device=device,
            memory_bytes=plan.memory_bytes,
        )


def check_parity(
    runner: StepRunner, batch: Batch, baseline: Baseline | None, *, folder: Path | None = None
) -> ParityReport:
    """Run the same step several times, compare each with the baseline and restore the state; return the worst report.

    Leftovers of one step (graphs, receives) could corrupt the next; under DDP the third step is the first with torch's
    buckets. The last step also compares the optimizer step. Inference is measured as a stream, so that is compared too.
    ``folder``: for this worker's copies of gradients, if the baseline is streamed.
    """
    plan, device = runner.plan, runner.context.torch_device
    before = {name: value.clone() for name, value in runner.part.buffers().items()}

    def restore() -> None:
        with torch.no_grad():
            for name, value in runner.part.buffers().items():
                value.copy_(before[name])
        runner.part.zero_gradients()
        runner.step_number = 0
        if runner.codecs is not None:
            runner.codecs.reset()

    def step() -> PipelineResult:
        with full_precision():
            return runner.train_step(batch, keep_outputs=True) if plan.training else runner.infer(batch)

    runner.step_number = 0
    if runner.scaler is not None:
        runner.scaler.scale = PARITY_SCALE
    if device.type == "cuda" and plan.mesh.pipeline > 1:
        step()  # the first step goes through host memory, unlike all later ones
        restore()
    reports: list[ParityReport] = []
    # Replicas share only running statistics; of all other buffers, replica 0's are compared.
    shared = running_statistics(runner.model.module) if runner.context.data else None
    is_streamed = runner.model.weights is not None

    def compare(loss: float, outputs: Sequence[Any]) -> ParityReport:
        activity.begin("compare with the baseline")
        buffers = runner.part.full_buffers()
        return compare_with_baseline(
            baseline,
            loss=loss,
            gradients=runner.part.full_gradients(lazily=is_streamed) if plan.training else {},
            buffers=buffers if shared is None else {name: buffers[name] for name in buffers if name in shared},
            outputs=_by_microbatch(runner, outputs),
            tolerance=TOLERANCES[plan.compute_dtype],
            device=device,
            trained=runner.part.trainable_parameters() if plan.training else (),
        )

    make = functools.partial(make_optimizer, plan.optimizer)
    has_ddp_buckets = plan.training and plan.mesh.data > 1 and plan.num_stages == 1 and not plan.shard and not plan.zero
    for is_last in (False, False, True) if has_ddp_buckets else (False, True):
        stepped_from = None
        if is_last and plan.optimizer_in_backward:
            result, stepped_from = step_in_backward(runner, make, step)
        else:
            result = step()
        loss = runner.total_loss(result)
        reports.append(compare(loss, result.outputs))
        if is_last and plan.training:
            reports[-1] = _with_optimizer_step(
                reports[-1], runner, make, baseline, stepped_from, folder if is_streamed else None
            )
        is_stateful = not plan.training and any(
            not bool(equal_or_nan(value, before[name]).all()) for name, value in runner.part.buffers().items()
        )
        restore()
    if not plan.training:
        # A stateful model gives other outputs in a second round.
        flags = torch.tensor([float(is_stateful)], device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)  # on any worker
        rounds = 1 if flags else 2
        with full_precision():
            results = (output for output in runner.stream(batch, rounds) if output is not None)
            outputs = [structure.map_tensors(torch.Tensor.cpu, output) for output in results]
        size = len(outputs) // rounds
        for index in range(rounds):
            reports.append(compare(loss, outputs[index * size : (index + 1) * size]))
        restore()
    if runner.scaler is not None:
        runner.scaler.scale = INITIAL_SCALE
    worst = max(reports, key=lambda row: (not row.equal, row.loss, row.outputs, row.gradients, row.buffers))
    return dataclasses.replace(worst, updates=max(report.updates for report in reports), streamed=is_streamed)


def _with_optimizer_step(
    report: ParityReport,
    runner: StepRunner,
    make: MakeOptimizer,
    baseline: Baseline | None,
    before: dict[str, torch.Tensor] | None,
    folder: Path | None,
) -> ParityReport:
    activity.begin("compare the optimizer step")
    updates, name = compare_optimizer_step(runner, make, baseline, before, folder)
    if updates <= report.tolerance:
        return dataclasses.replace(report, updates=updates)
    return dataclasses.replace(report, updates=updates, equal=False, worst=name if report.equal else report.worst)


def _by_microbatch(runner: StepRunner, outputs: Sequence[Any]) -> dict[int, list[torch.Tensor]]:
    """Return output tensors by their micro-batch index over all replicas."""
    device, batch = runner.context.torch_device, _example(runner.model)
    start = sum(len(runner.splitter.split(batch, device, index)) for index in range(runner.context.data))
    return {start + index: structure.tensors(output) for index, output in enumerate(outputs)}


def _example(model: Model) -> Batch:
    return Batch(args=model.args, kwargs=model.kwargs, target=model.target)
