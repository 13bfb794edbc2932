"""The optimizer of a plan.

To add one, also name it in ``OptimizerSpec`` (`spec.plan`), ``OPTIMIZERS`` (`spec.plan_rules`) and, with its states per
parameter, in `simulator.memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import nn

from stagewright.spec.plan import OptimizerSpec

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer for the parameters of one worker."""


def make_optimizer(spec: OptimizerSpec, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the plan's optimizer for this worker's parameters."""
    if spec.name == "sgd":
        return torch.optim.SGD(
            parameters, lr=spec.learning_rate, momentum=spec.momentum, weight_decay=spec.weight_decay
        )
    if spec.name == "adam":
        return torch.optim.Adam(parameters, lr=spec.learning_rate, weight_decay=spec.weight_decay)
    assert spec.name == "adamw", f"unknown optimizer {spec.name!r}"
    return torch.optim.AdamW(parameters, lr=spec.learning_rate, weight_decay=spec.weight_decay)
