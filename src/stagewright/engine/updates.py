"""The optimiser's step of a plan, compared with torch's own on whole tensors.

    whole parameters and gradients, on the host ─► torch's optimiser, a tensor at a time ─► expected
    what each worker holds ─► the plan's clipping and optimiser ─► whole parameters ─► found; then all is put back

Both begin with the plan's gradients, which have been compared with serial's: Adam makes as much of a gradient's
rounding as of a gradient. The norm by which they are clipped is that of serial's.

    relative difference = (largest |found - expected| - rounding of the parameter) / largest |expected - before|

Where a plan clips, what it makes of the gradients is compared as well: Adam's first step is the same for any factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from stagewright.engine.broadcast import broadcast
from stagewright.engine.difference import SMALLEST, relative
from stagewright.engine.equality import Reference, worst_of_all
from stagewright.engine.replica import Replica

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
    own = [parameter for parameter in replica.module.parameters() if parameter.requires_grad]
    held = [_local(parameter).detach().to("cpu", copy=True) for parameter in own]
    before, gradients = _on_host(replica.full_parameters()), _on_host(replica.full_gradients())
    replica.change_parameters(make(own) if own else None)
    found = _on_host(replica.full_parameters())
    clipped = _on_host(replica.full_gradients()) if clip is not None else {}
    with torch.no_grad():
        for parameter, value in zip(own, held, strict=True):
            _local(parameter).copy_(value)
    differences = {}
    for name, value in before.items():
        expected = _stepped(value, gradients[name] * scale, make) if name in gradients else value
        differences[f"the optimiser's step of {name}"] = _difference(found[name], expected, value)
    for name, value in clipped.items():
        wanted = gradients[name].double() * scale
        differences[f"the clipped gradient of {name}"] = relative(value.double(), wanted, float(wanted.abs().max()))
    worst = max(differences, key=differences.__getitem__, default="nothing")
    largest = differences.get(worst, 0.0)
    name = worst_of_all(worst, largest, device)
    most = torch.tensor([largest], dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most), name


def _norm(reference: Reference | None, device: torch.device) -> float:
    """Of the whole model's gradient, as serial has it."""
    every = reference.gradients.values() if reference is not None else ()
    squares = torch.tensor([sum(float(one.double().square().sum()) for one in every)], dtype=torch.float64)
    return float(next(broadcast([squares], device)).sqrt())


def _stepped(value: torch.Tensor, gradient: torch.Tensor, make: MakeOptimizer) -> torch.Tensor:
    """A whole parameter after one step of its own."""
    parameter = nn.Parameter(value.clone())
    parameter.grad = gradient
    make([parameter]).step()
    return parameter.detach()


def _difference(found: torch.Tensor, expected: torch.Tensor, before: torch.Tensor) -> float:
    if not expected.numel():
        return 0.0
    apart, update = ((one.double() - expected.double()).abs().max() for one in (found, before))
    rounding = ROUNDINGS * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    difference = max(float(apart) - rounding, 0.0) / max(float(update), SMALLEST)
    return float("inf") if difference != difference else difference


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _on_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies."""
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}
