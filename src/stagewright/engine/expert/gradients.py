"""Gradients of divided experts: summed over the replicas that hold the same experts, never over the expert axis.

    data=4, expert=2      worker    0      1      2      3
                          experts   0 1    2 3    0 1    2 3
                          sums      ├──────┼──────┤      │
                                           └─────────────┘

Each worker's experts have seen the rows of its whole expert axis, so nothing is left to sum along it. Losses are
weighted by samples over the global batch, as everywhere in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stagewright.engine.data.gradient_allreduce import BUCKET_BYTES, bucket_parameters
from stagewright.engine.worker.recorder import recorder


class ExpertGradientSync:
    """The gradients of one worker's experts."""

    def __init__(self, parameters: Sequence[nn.Parameter], expert_group: Any, same_experts_group: Any) -> None:
        """``same_experts_group``: replicas with the same experts, or None if there is no other."""
        self._parameters = list(parameters)
        self._groups = [group for group in (expert_group, same_experts_group) if group is not None]
        self._same_experts_group = same_experts_group

    @torch.no_grad()
    def finish(self) -> int:
        """Complete the gradients after backward; return the bytes of the all-reduces.

        A parameter that only other workers used gets zeros, as in the baseline; one that no worker used has none.
        """
        if not self._parameters:
            return 0
        flags = torch.tensor([float(parameter.grad is not None) for parameter in self._parameters])
        flags = flags.to(self._parameters[0].device)
        start = recorder.now()
        for group in self._groups:
            dist.all_reduce(flags, group=group)
        recorder.add("collective", start, num_bytes=flags.nbytes, note="expert")
        used = [parameter for parameter, flag in zip(self._parameters, flags.tolist(), strict=True) if flag]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return self._all_reduce(used) if self._same_experts_group is not None else 0

    def _all_reduce(self, parameters: Sequence[nn.Parameter]) -> int:
        total = 0
        for bucket in bucket_parameters(parameters, BUCKET_BYTES):
            gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            start = recorder.now()
            dist.all_reduce(flat, group=self._same_experts_group)
            recorder.add("collective", start, num_bytes=flat.nbytes, note="data")
            total += flat.nbytes
            values = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, value in zip(gradients, values, strict=True):
                gradient.copy_(value.view_as(gradient))
        return total
