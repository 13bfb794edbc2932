"""Gradient clipping by global norm, as ``torch.nn.utils.clip_grad_norm_`` does on a single device.

    gradient of                             counted by
    a parameter of a stage                  its worker, in replica 0, first along the tensor axis
    a tied weight on several stages         the first of its holders: each has the full gradient
    a tensor-parallel shard                 each worker of the tensor axis, in replica 0
    an FSDP or ZeRO shard                   each replica

    local sum of squares ─► all-reduce of one scalar ─► norm ─► gradients · min(1, limit / (norm + 1e-6))

Each element of the model's gradient counts once, every worker gets the same norm, and the only communication is one
scalar. Gradients must be complete: after the all-reduces over replicas and over the holders of tied weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from stagewright.engine.worker.recorder import recorder

_EPSILON = 1e-6  # as in torch: avoids a division by 0


class GradientClipper:
    """Gradient clipping on one worker."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        limit: float,
        counted: Sequence[nn.Parameter],
        num_workers: int,
        device: torch.device,
    ) -> None:
        """``parameters``: all that this worker trains; ``counted``: those that it counts for the norm."""
        self._parameters = list(parameters)
        self._counted = list(counted)
        self._limit, self._num_workers, self._device = limit, num_workers, device

    @torch.no_grad()
    def apply(self) -> torch.Tensor:
        """Clip all gradients; return the norm before clipping, the same on every worker.

        A norm that is not finite makes all gradients non-finite, as in torch.
        """
        squares = torch.zeros(1, dtype=torch.float64, device=self._device)
        counted = _local_gradients(self._counted)
        if counted:  # 16-bit types are too narrow for a sum
            dtype = torch.float64 if _any_float64(counted) else torch.float32
            norms = torch._foreach_norm(counted, 2, dtype=dtype)
            squares += torch.stack(norms).double().square().sum()
        if self._num_workers > 1:
            start = recorder.now()
            dist.all_reduce(squares)
            recorder.add("collective", start, num_bytes=squares.element_size(), note="norm")
        norm = squares.sqrt().squeeze()
        gradients = _local_gradients(self._parameters)
        if gradients:
            scale = (self._limit / (norm + _EPSILON)).clamp(max=1.0)
            torch._foreach_mul_(gradients, scale if _any_float64(gradients) else scale.float())
        return norm


def _any_float64(tensors: Sequence[torch.Tensor]) -> bool:
    return any(tensor.dtype is torch.float64 for tensor in tensors)


def _local_gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradients that this worker holds; of FSDP parameters its shards."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
