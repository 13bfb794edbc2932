"""The optimiser's step of a plan, compared with torch's own.

    what each worker holds ─► the plan's clipping and optimiser ─► found; then all is put back
    the same on the host   ─► torch's optimiser, a tensor at a time ─► expected

Both begin with the plan's gradients, which have been compared with serial's: Adam makes as much of a gradient's
rounding as of a gradient. The norm by which they are clipped is that of serial's. Optimisers change each number by
itself, so that parts of a tensor are as good as the whole.

    relative difference = (largest |found - expected| - rounding of the parameter) / largest |expected - before|

Where a plan clips, what it makes of the gradients is compared as well: Adam's first step is the same for any factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from stagewright.engine.parallel.replica import Replica
from stagewright.engine.parity.comparison import Reference, worst_of_all
from stagewright.engine.parity.relative_error import SMALLEST, numbers, relative
from stagewright.engine.worker.broadcast import broadcast

__all__ = ["compare_updates"]

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
ROUNDINGS = 4  # of a parameter, in units of its last place: kernels multiply and add in other orders
LEAST = 1e-6  # added to a norm, as torch does


def compare_updates(replica: Replica, make: MakeOptimizer, reference: Reference | None) -> tuple[float, str]:
    """The largest difference on any worker, and whose it is; parameters are as before, gradients are not.

    Every worker must call this after a step, before its gradients are forgotten; worker 0 with its reference.
    """
    device, clip = replica.context.torch_device, replica.plan.clip
    scale = 1.0 if clip is None else min(1.0, clip / (_norm(reference, device) + LEAST))
    trained = replica.trained()
    before = {name: _on_host(one) for name, one in trained.items()}
    gradients = {name: _on_host(one.grad) for name, one in trained.items() if one.grad is not None}
    replica.change_parameters(make(list(trained.values())) if trained else None)
    differences = {}
    for name, parameter in trained.items():
        value, gradient = before[name], gradients.get(name)
        expected = value if gradient is None else _stepped(value, gradient * scale, make)
        differences[f"the optimiser's step of {name}"] = _difference(_on_host(parameter), expected, value)
        if clip is not None and gradient is not None:
            wanted, found = numbers(gradient) * scale, numbers(_on_host(parameter.grad))
            size = float(wanted.abs().max()) if wanted.numel() else 0.0
            differences[f"the clipped gradient of {name}"] = relative(found, wanted, size)
        with torch.no_grad():
            _local(parameter).copy_(value)
    worst = max(differences, key=differences.__getitem__, default="nothing")
    largest = differences.get(worst, 0.0)
    name = worst_of_all(worst, largest, device)
    most = torch.tensor([largest], dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most), name


def _norm(reference: Reference | None, device: torch.device) -> float:
    """Of the whole model's gradient, as serial has it."""
    every = reference.gradients.values() if reference is not None else ()
    squares = torch.tensor([sum(float(numbers(one).square().sum()) for one in every)], dtype=torch.float64)
    return float(next(broadcast([squares], device)).sqrt())


def _stepped(value: torch.Tensor, gradient: torch.Tensor, make: MakeOptimizer) -> torch.Tensor:
    """A parameter after one step of its own."""
    parameter = nn.Parameter(value.clone())
    parameter.grad = gradient
    make([parameter]).step()
    return parameter.detach()


def _difference(found: torch.Tensor, expected: torch.Tensor, before: torch.Tensor) -> float:
    if not expected.numel():
        return 0.0
    apart, update = ((numbers(one) - numbers(expected)).abs().max() for one in (found, before))
    rounding = ROUNDINGS * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    difference = max(float(apart) - rounding, 0.0) / max(float(update), SMALLEST)
    return float("inf") if difference != difference else difference


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this worker has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _on_host(tensor: torch.Tensor | None) -> torch.Tensor:
    """A copy of what this worker has of it."""
    assert tensor is not None
    return _local(tensor.detach()).to("cpu", copy=True)
