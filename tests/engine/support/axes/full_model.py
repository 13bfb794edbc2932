"""The full state and gradients of a distributed model, by the plain model's names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from stagewright.engine.state.full_state import full_tensors
from stagewright.engine.tensor.layers import shard_layouts


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather the plain model's ``state_dict``."""
    return full_tensors(model, {name: value.detach() for name, value in model.state_dict().items()})


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Gather gradients by the plain model's names, a tied one under each name; ``None`` if there is no gradient."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    full = full_tensors(model, {name: value for name, value in gradients.items() if value is not None})
    return {name: full.get(name) for name in gradients}


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load this worker's shards of a plain model's ``state_dict``, in place."""
    targets, layouts = model.state_dict(), shard_layouts(model)
    assert targets.keys() == state.keys()
    for name, target in targets.items():
        value = state[name].to(device=target.device, dtype=target.dtype)
        if name in layouts:
            value = layouts[name].shard(value)
        if isinstance(target, DTensor):
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(value)
