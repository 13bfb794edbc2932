"""Loss scaling of fp16-mixed training: gradients too small for float16 are scaled up, and checked for overflow.

    backward of scale · loss ─► gradient all-reduce ─► unscale ─► overflow on any worker? ─► skip the step, scale / 2
                                                                  no overflow for a while: scale · 2

The rule is that of ``torch.amp.GradScaler``; the check covers all workers, since each holds a part of the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

INITIAL_SCALE = 2.0**16
PARITY_SCALE = 2.0**10
"""Scale of the parity check, in the plan and its baseline: large enough to show, too small to overflow."""
GROWTH_INTERVAL = 2000
"""Steps without overflow after which the scale is doubled."""


class LossScaler:
    """The loss scale of one worker, the same on every worker."""

    def __init__(self, num_workers: int, device: torch.device) -> None:
        self.scale = INITIAL_SCALE
        self.overflowed = False
        """Whether a gradient of the last step was infinite or NaN: its optimizer step is skipped."""
        self._num_workers, self._device = num_workers, device
        self._good_steps = 0

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the scale, and find out whether one overflowed on any worker."""
        found = torch.zeros(1, device=self._device)
        factor = torch.full((1,), 1.0 / self.scale, device=self._device)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        for dtype in {gradient.dtype for gradient in local}:
            group = [gradient for gradient in local if gradient.dtype == dtype]
            torch._amp_foreach_non_finite_check_and_unscale_(group, found, factor)
        if self._num_workers > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        self.overflowed = bool(found)

    def update(self) -> None:
        """Adapt the scale after a step."""
        if self.overflowed:
            self.scale, self._good_steps = self.scale / 2, 0
            return
        self._good_steps += 1
        if self._good_steps == GROWTH_INTERVAL:
            self.scale, self._good_steps = self.scale * 2, 0
