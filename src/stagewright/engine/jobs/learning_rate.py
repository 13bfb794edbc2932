"""The learning rate of a step: linear warm-up, then constant, linear decay or cosine decay to 0 at the last step."""

from __future__ import annotations

import math

from stagewright.spec.plan import OptimizerSpec


def learning_rate(spec: OptimizerSpec, step: int, num_steps: int) -> float:
    """Return the learning rate of step `step`, from 0, of a run of `num_steps`."""
    warmup = spec.lr_warmup_steps
    if step < warmup:
        return spec.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    factors = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    return spec.learning_rate * factors[spec.lr_schedule]
