"""The optimizers that a plan may name. To add one, add a line here: everything else reads this table.

Nothing here imports torch: `engine.parallel.optimizer` makes the optimizer, `simulator.memory` counts its states.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_OPTIMIZER = "adamw"
DEFAULT_LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRule:
    """What a plan needs to know about an optimizer."""

    torch_name: str
    """Its class in `torch.optim`, which takes `lr` and `weight_decay`."""
    num_states: int
    """States as large as a parameter, without momentum."""
    has_momentum: bool = False
    """Whether it takes `momentum`, one more state where it is above 0."""
    has_fused_kernel: bool = False
    """Whether torch has a kernel that steps many parameters at once, in one pass over their memory."""


OPTIMIZERS = {
    "adamw": OptimizerRule(torch_name="AdamW", num_states=2, has_fused_kernel=True),
    "adam": OptimizerRule(torch_name="Adam", num_states=2, has_fused_kernel=True),
    "sgd": OptimizerRule(torch_name="SGD", num_states=0, has_momentum=True, has_fused_kernel=True),
    "rmsprop": OptimizerRule(torch_name="RMSprop", num_states=1, has_momentum=True),
}
