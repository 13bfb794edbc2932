"""Gradients of blocks with divided sequences: each worker has the part of its positions, and the parts are summed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from stagewright.engine.context.axis import ContextAxis
from stagewright.engine.data.gradient_allreduce import BUCKET_BYTES, bucket_parameters


@torch.no_grad()
def sum_gradients(axis: ContextAxis, parameters: Iterable[nn.Parameter]) -> None:
    """All-reduce gradients in buckets; workers have gradients of the same parameters."""
    for bucket in bucket_parameters([value for value in parameters if value.grad is not None], BUCKET_BYTES):
        gradients = [value.grad for value in bucket if value.grad is not None]
        flat = axis.all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        values = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, value in zip(gradients, values, strict=True):
            gradient.copy_(value.view_as(gradient))
