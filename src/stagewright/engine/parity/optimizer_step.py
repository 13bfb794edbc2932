"""Compare the optimizer step of a plan with torch's optimizer on a single tensor.

    what each worker holds ─► the plan's clipping and optimizer ─► parameters; then they are restored
    copies on the host     ─► torch's optimizer, one tensor at a time ─► expected

With the optimizer in backward, gradients are copied before they are freed, and compared like any others.

For a streamed baseline, the copies are files, and values before the step are read again from those of the weights.

Both start from the plan's gradients, which have been compared with the baseline's: Adam amplifies a gradient's rounding
error. The clipping norm is the baseline's. Optimizers change each element separately, so a shard is as good as a full
tensor.

    relative error = (max |parameter - expected| - rounding of the parameter) / max |expected - before|

If a plan clips, the clipped gradients are compared as well, because Adam's first step is the same for any scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from stagewright.engine.parallel.optimizer import MakeOptimizer
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.parity.baseline import Baseline
from stagewright.engine.parity.comparison import worst_of_all_workers
from stagewright.engine.parity.relative_error import CHUNK, SMALLEST, largest_difference, relative_error, to_float64
from stagewright.engine.parity.spooled_tensors import SpooledTensors
from stagewright.engine.pipeline.config import PipelineResult
from stagewright.engine.state.full_state import full_tensor
from stagewright.engine.worker.broadcast import broadcast

ROUNDINGS = 4  # in units in the last place of a parameter: kernels multiply and add in different orders
EPSILON = 1e-6  # added to the norm, as in torch


def step_in_backward(
    runner: StepRunner, make: MakeOptimizer, step: Callable[[], PipelineResult]
) -> tuple[PipelineResult, dict[str, torch.Tensor]]:
    """Run a step with the optimizer in backward; return its result and the parameters before.

    The gradients, which the step frees, are there again afterwards.
    """
    assert runner.in_backward is not None, "the plan has optimizer_in_backward = true"
    parameters = runner.part.trainable_parameters()
    before = {name: _copy_to_host(parameter) for name, parameter in parameters.items()}
    optimizer = make(list(parameters.values())) if parameters else None
    runner.in_backward.optimizer, runner.in_backward.gradients = optimizer, {}
    result = step()
    runner.optimizer_step(optimizer)  # parameters whose gradients are not final in backward
    for name, gradient in runner.in_backward.gradients.items():
        assert parameters[name].grad is None, "a gradient is freed when its parameter is stepped"
        parameters[name].grad = gradient
    runner.in_backward.optimizer = runner.in_backward.gradients = None
    return result, before


def compare_optimizer_step(
    runner: StepRunner,
    make: MakeOptimizer,
    baseline: Baseline | None,
    before: dict[str, torch.Tensor] | None = None,
    folder: Path | None = None,
) -> tuple[float, str]:
    """Return the largest relative error on any worker and its name; parameters are restored, gradients are not.

    Every worker must call this after a step, before gradients are zeroed; worker 0 with its baseline. ``before``:
    the parameters before the step, if it has stepped the optimizer. ``folder``: for copies of the gradients, instead of
    host memory; parameters before the step are then read again from the files of a model without weights.
    """
    device, clip = runner.context.torch_device, runner.plan.clip
    scale = 1.0 if clip is None else min(1.0, clip / (_gradient_norm(baseline, device) + EPSILON))
    trained = runner.part.trainable_parameters()
    gradients = _spool(runner, folder) if folder is not None else _gradients(runner)
    if before is None:
        before = {
            name: _copy_to_host(value)
            for name, value in trained.items()
            if folder is None or isinstance(value, DTensor)
        }
        stepped = runner.part.optimizer_parameters()
        runner.optimizer_step(make(list(stepped.values())) if trained else None)
    clipped_gradients = _gradients(runner) if clip is not None else {}
    errors = {}
    for name, parameter in trained.items():
        held = _local(parameter.detach())
        value = before[name].to(held.device) if name in before else runner.part.read_weight(name, held)
        gradient = gradients.get(name)
        expected = value if gradient is None else _step_alone(value, gradient.to(held.device) * scale, make)
        errors[f"the optimizer step of {name}"] = _error(held, expected, value)
        if clip is not None and gradient is not None:
            clipped = to_float64(gradient.to(held.device)) * scale
            largest = float(clipped.abs().max()) if clipped.numel() else 0.0
            actual = to_float64(clipped_gradients[name].to(held.device))
            errors[f"the clipped gradient of {name}"] = relative_error(actual, clipped, largest)
        held.copy_(value)
    worst = max(errors, key=errors.__getitem__, default="nothing")
    error = errors.get(worst, 0.0)
    name = worst_of_all_workers(worst, error, device)
    largest_error = torch.tensor([error], dtype=torch.float64, device=device)
    dist.all_reduce(largest_error, op=dist.ReduceOp.MAX)
    return float(largest_error), name


def _held_gradients(runner: StepRunner) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the gradients of what this worker holds; with ZeRO, which shards them alone, in full."""
    shards, full = runner.part.shards, runner.part.trainable_parameters()
    for name, parameter in runner.part.optimizer_parameters().items():
        if parameter.grad is not None:
            gradient = parameter.grad
            yield name, gradient if shards is None else full_tensor(shards.distributed(full[name], gradient))


def _gradients(runner: StepRunner) -> dict[str, torch.Tensor]:
    """Copy the gradients to the host."""
    return {name: _copy_to_host(value) for name, value in _held_gradients(runner)}


def _spool(runner: StepRunner, folder: Path) -> SpooledTensors:
    """Copy the gradients to files."""
    tensors = SpooledTensors(folder)
    for name, value in _held_gradients(runner):
        tensors.add(name, _local(value.detach()))
    return tensors


def _gradient_norm(baseline: Baseline | None, device: torch.device) -> float:
    """Return the global norm of the baseline's gradients, on every worker."""
    gradients = baseline.gradients.values() if baseline is not None else ()
    squares = sum(float(to_float64(gradient).square().sum()) for gradient in gradients)
    return float(next(broadcast([torch.tensor([squares], dtype=torch.float64)], device)).sqrt())


def _step_alone(value: torch.Tensor, gradient: torch.Tensor, make: MakeOptimizer) -> torch.Tensor:
    """Return a parameter after one step of its own optimizer."""
    parameter = nn.Parameter(value.clone())
    parameter.grad = gradient
    make([parameter]).step()
    return parameter.detach()


def _error(value: torch.Tensor, expected: torch.Tensor, before: torch.Tensor) -> float:
    if not expected.numel():
        return 0.0
    difference, update = (_largest_difference(tensor, expected) for tensor in (value, before))
    rounding = ROUNDINGS * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    if math.isnan(difference) or math.isnan(update):
        return float("inf")
    return max(difference - rounding, 0.0) / max(update, SMALLEST)


def _largest_difference(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference, NaN if there is one."""
    pairs = zip(*(torch.split(tensor.reshape(-1), CHUNK) for tensor in (value, expected)), strict=True)
    differences = [largest_difference(a, b) for a, b in pairs]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this worker's shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return _local(tensor.detach()).to("cpu", copy=True)
