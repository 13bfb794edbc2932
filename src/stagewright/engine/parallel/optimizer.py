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
    rate, decay = spec.learning_rate, spec.weight_decay
    if spec.name == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=spec.momentum, weight_decay=decay)
    kinds: dict[str, type[torch.optim.Adam]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    return kinds[spec.name](parameters, lr=rate, weight_decay=decay)
