"""Repeat a failed comparison in float64, which separates rounding at kinks from a wrong plan.

ReLU, max pooling and top-k have kinks. Where a plan splits sums, they round differently, and of millions of activations
a few change sides; a gradient then differs by a thousandth and more, although the plan is right:

    sum on one device   +1e-8 ─► ReLU ─► gradient passes          float64: the sums differ by 1e-16,
    sums of two halves  -1e-8 ─► ReLU ─► gradient is 0            and no activation is that close to 0

A wrong plan is wrong in any dtype. So the same plan is compared again with model and batch in float64, with the
tolerance of float32. Few samples suffice, because every layer and collective takes part in every step.

The float32 step must still be right where rounding has small effects only: in the loss, the outputs and the buffers.

A codec has such a kink at the edge of every quantization step, and rounding moves values across it in the forward too.
In float64 the plan and its baseline encode the same messages, so this also replaces the measured rounding sensitivity:
a plan that passes only because of it is compared again.
"""

from __future__ import annotations

import dataclasses
import gc
import sys

import torch
from torch import nn

from stagewright.engine.parallel.model import capture_for, load_model
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.parity.baseline import Baseline
from stagewright.engine.parity.check import baseline_of, check_parity
from stagewright.engine.parity.tolerances import MAX_SENSITIVITY, TOLERANCES
from stagewright.engine.worker.broadcast import gather_text
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity
from stagewright.graph.unit_graph import UnitGraph
from stagewright.machine.host_memory import available_bytes
from stagewright.quantity import format_bytes
from stagewright.runs.result import ParityReport
from stagewright.spec.plan import Plan
from stagewright.zoo.model import Batch, Model

SAMPLES_PER_MICROBATCH = 2
"""Two, because batch norm has no variance for one value per channel."""
MAX_CONTINUOUS_ERROR = 1e-3
"""Largest error of loss, outputs and buffers, which have no kinks without a codec, for a comparison in float64."""
COPIES = 3
"""Float64 copies of the model that a worker may hold at once: weights, gradients of the baseline and of the plan."""


def decide_in_float64(plan: Plan, report: ParityReport, context: WorkerContext, model_bytes: int) -> ParityReport:
    """Return the report of a plan, decided by a comparison in float64 if rounding may explain why it failed.

    Every worker must call this. ``model_bytes``: size of the whole model's parameters. If the memory is too small for
    it, or the model can't run in float64, the report says so (``undecided``) and stays as it is otherwise.
    """
    report = dataclasses.replace(report, codecs=_codecs(plan))
    if not may_be_rounding(plan, report):
        return report
    if plan.compute_dtype != "float32":
        only = f"only plans in float32 are repeated in float64, and this one computes in {plan.compute_dtype}"
        return dataclasses.replace(report, undecided=None if report.equal else only)
    activity.begin("compare in float64")
    plan = dataclasses.replace(plan, batch=_num_samples(plan))
    prepared = _prepare(plan, context, 2 * COPIES * model_bytes)
    reasons = gather_text(prepared if isinstance(prepared, str) else "", context.torch_device)
    if any(reasons):
        return dataclasses.replace(report, undecided=next(filter(None, reasons)))
    assert not isinstance(prepared, str)
    model, graph, baseline = prepared
    runner = StepRunner(plan, model, context, graph)
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    with runner.memory.explain_oom():
        in_float64 = check_parity(runner, batch, baseline)
    del runner, model, graph, baseline, prepared, batch
    gc.collect()
    if context.torch_device.type == "cuda":
        torch.cuda.empty_cache()
    worst = report.worst if in_float64.equal else in_float64.worst
    return dataclasses.replace(report, equal=in_float64.equal, worst=worst, float64_error=in_float64.max_error)


def may_be_rounding(plan: Plan, report: ParityReport) -> bool:
    """Return whether rounding may be why a plan failed the check, or passed with a raised tolerance under a codec.

    Without a codec only gradients may differ, and only if the plan splits sums, as replicas do: otherwise the
    activations are those of the baseline, bit for bit. With a codec everything that follows an encoded tensor may
    differ.
    """
    # A gradient that is zero but for rounding has any relative error; the baseline's own sensitivity says so.
    largest = sys.float_info.max if report.tolerance >= MAX_SENSITIVITY else MAX_SENSITIVITY
    is_small = all(error <= largest for error in (report.gradients, report.updates))
    forward = (report.loss, report.outputs, report.buffers)
    if plan.has_codecs:
        is_raised = report.tolerance > TOLERANCES[plan.compute_dtype]
        return (not report.equal or is_raised) and is_small and all(error <= largest for error in forward)
    tolerance = min(report.tolerance, MAX_CONTINUOUS_ERROR)
    is_continuous = all(error <= tolerance for error in forward)
    splits_sums = plan.mesh.num_workers > plan.mesh.pipeline
    is_eligible = plan.training and plan.compute_dtype == "float32" and splits_sums
    return not report.equal and is_eligible and is_continuous and is_small


def _codecs(plan: Plan) -> tuple[str, ...]:
    """Return the distinct codecs of a plan's links."""
    cuts = range(plan.num_stages - 1)
    names = [plan.codec_of(cut, backward=backward) for cut in cuts for backward in (False, True)]
    return tuple(dict.fromkeys(name for name in names if name != "none"))


def _num_samples(plan: Plan) -> int:
    """Return a batch that fills every micro-batch; the whole one where replicas of different speeds divide it."""
    smallest = SAMPLES_PER_MICROBATCH * plan.microbatches * plan.mesh.data
    return plan.batch if plan.speeds else min(plan.batch, smallest)


def _prepare(plan: Plan, context: WorkerContext, needed_bytes: int) -> tuple[Model, UnitGraph, Baseline | None] | str:
    """Load and capture the model in float64, on worker 0 with its baseline; or say why that can't be done."""
    available = _available_bytes(plan, context.torch_device)
    if available is not None and needed_bytes > available:
        needed = f"{format_bytes(needed_bytes)} for up to {COPIES} copies of the model"
        return f"each worker needs {needed}, and has {format_bytes(available)}"
    try:
        model = load_model(plan, context, dtype="float64")
        kept = _not_float64(model.module)
        if kept is not None:
            return f"the model keeps {kept[0]} in {kept[1]}"
        graph = capture_for(plan, model)
        baseline = baseline_of(plan, model, graph, context, exact=True) if context.rank == 0 else None
    except Exception as error:  # code of the user that expects float32, or a kernel without float64
        first_line = (str(error).splitlines() or [""])[0]
        return f"the model can't run in float64 ({type(error).__name__}: {first_line})"
    return model, graph, baseline


def _not_float64(module: nn.Module) -> tuple[str, str] | None:
    """Return name and dtype of the first floating-point parameter that is not float64."""
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float64:
            return name, str(parameter.dtype).removeprefix("torch.")
    return None


def _available_bytes(plan: Plan, device: torch.device) -> int | None:
    """Return the memory that a worker may use, if it is known; workers of one host share its memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = available_bytes()
    return None if available is None else available // plan.mesh.num_workers
