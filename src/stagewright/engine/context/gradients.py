"""Gradients of blocks with divided sequences: each worker has the part of its positions, and the parts are summed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from stagewright.engine.data.gradient_allreduce import BUCKET_BYTES, bucket_parameters
from stagewright.engine.tensor.axis import Axis


@torch.no_grad()
def sum_gradients(axis: Axis, parameters: Iterable[nn.Parameter]) -> None:
    """All-reduce gradients, or this replica's shards of them, in buckets.

    Workers have gradients of the same parameters.
    """
    for bucket in bucket_parameters([value for value in parameters if value.grad is not None], BUCKET_BYTES):
        held = [value.grad for value in bucket if value.grad is not None]
        gradients = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in held]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        if not flat.numel():  # a shard may be empty
            continue
        axis.all_reduce(flat)
        values = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, value in zip(gradients, values, strict=True):
            gradient.copy_(value.view_as(gradient))
