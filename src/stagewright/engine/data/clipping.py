"""Clip gradients by their norm over the whole model, as ``torch.nn.utils.clip_grad_norm_`` does for the plain one.

    whose gradient                          counted by
    a parameter of a stage                  its worker, in replica 0, first along the tensor axis
    a tied weight, held by several stages   the first of its holders: each has the whole sum
    a part of a layer, on the tensor axis   each worker of that axis, in replica 0
    a part of a parameter (FSDP2)           each replica

    sum of squares here ─► one number summed over all workers ─► norm ─► gradients · min(1, limit / (norm + 1e-6))

So each number of the model's gradient counts once, every worker finds the same norm, and none waits for more than that
one number. Gradients must be whole: after the sums over replicas and holders of tied weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from stagewright.engine.worker.recorder import recorder

__all__ = ["GradientClip"]

_LEAST = 1e-6  # torch's: a norm of 0 divides nothing


class GradientClip:
    """One worker's part of it."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        limit: float,
        counts: Callable[[nn.Parameter], bool],
        num_workers: int,
        device: torch.device,
    ) -> None:
        """``parameters``: all that this worker trains; ``counts``: whether one of them is counted here."""
        self._parameters, self._counted = list(parameters), [one for one in parameters if counts(one)]
        self._limit, self._num_workers, self._device = limit, num_workers, device

    @torch.no_grad()
    def apply(self) -> torch.Tensor:
        """Clip; the norm before that, the same on every worker. One that is not finite spoils them all, as in torch."""
        squares = torch.zeros(1, dtype=torch.float64, device=self._device)
        counted = _gradients(self._counted)
        if counted:  # 16 bits would be too few for a sum
            wide = torch.float64 if any(one.dtype is torch.float64 for one in counted) else torch.float32
            norms = torch._foreach_norm(counted, 2, dtype=wide)
            squares += torch.stack(norms).double().square().sum()
        if self._num_workers > 1:
            start = recorder.now()
            dist.all_reduce(squares)
            recorder.add("collective", start, num_bytes=squares.element_size(), note="norm")
        norm = squares.sqrt().squeeze()
        every = _gradients(self._parameters)
        if every:
            scale = (self._limit / (norm + _LEAST)).clamp(max=1.0)
            torch._foreach_mul_(every, scale if any(one.dtype is torch.float64 for one in every) else scale.float())
        return norm


def _gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """What this worker holds of them; of shards, its own."""
    found = [one.grad for one in parameters if one.grad is not None]
    return [one.to_local() if isinstance(one, DTensor) else one for one in found]
