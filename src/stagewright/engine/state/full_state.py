"""Full tensors of a model, for any strategy.

    held by a worker                                        full
    a DTensor sharded over the data axis (FSDP2)            all-gathered over that axis
    a tensor-parallel shard                                 all-gathered over the tensor axis, sections in order

Gathering is collective: every worker of the axes must call the same function on the same module. It works on a stage
too, which has the names of its units. With FSDP2 pass the wrapped module: the original model keeps stale tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from stagewright.engine.tensor.layers import ShardLayout, shard_layouts


def full_tensors(
    model: nn.Module, held: Mapping[str, torch.Tensor], device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """Gather full tensors from what this worker holds per parameter: values, gradients or optimizer states.

    ``device``: where gathered tensors are put, one after another, because a worker's device may not fit the full model.
    """
    layouts = shard_layouts(model)
    full: dict[int, torch.Tensor] = {}
    for name, value in held.items():
        if id(value) not in full:
            full[id(value)] = full_tensor(value, layouts.get(name), device)
    return {name: full[id(value)] for name, value in held.items()}


def full_tensor(
    value: torch.Tensor, layout: ShardLayout | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """Gather one full tensor from this worker's shard, on ``device``; return the tensor itself if it is full."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    if layout is not None and whole.ndim:
        return layout.gather(whole, device)
    return whole if whole is value or device is None else whole.to(device)
