"""The optimizer of a plan, by the table of `spec.optimizers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import nn

from stagewright.spec.optimizers import OPTIMIZERS
from stagewright.spec.plan import OptimizerSpec

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer for the parameters of one worker."""


def make_optimizer(spec: OptimizerSpec, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the plan's optimizer for this worker's parameters."""
    rule = OPTIMIZERS[spec.name]
    momentum = {"momentum": spec.momentum} if rule.has_momentum else {}
    make: MakeOptimizer = getattr(torch.optim, rule.torch_name)
    return make(parameters, lr=spec.learning_rate, weight_decay=spec.weight_decay, **momentum)  # type: ignore[call-arg]
