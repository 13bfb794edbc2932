"""Full tensors under the plain model's names, for any strategy, and back.

    held by a worker                                        full
    DistributedDataParallel's "module.…"                    the name without the prefix
    a DTensor sharded over the data axis (FSDP2)            all-gathered over that axis
    a tensor-parallel shard                                 all-gathered over the tensor axis, sections in order

Gathering is collective: every worker of the axes must call the same function on the same module. It works on a stage
too, which has the names of its units. With FSDP2 pass the wrapped module: the original model keeps stale tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from stagewright.engine.tensor.layers import ShardLayout, shard_layouts
from stagewright.errors import UsageError

__all__ = ["full_gradients", "full_state_dict", "full_tensor", "full_tensors", "load_full_state_dict", "unwrap"]


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather the plain model's ``state_dict``."""
    plain = unwrap(model)
    return full_tensors(plain, {name: value.detach() for name, value in plain.state_dict().items()})


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Gather gradients under the plain model's names, a tied one under each name; ``None`` if there is no gradient."""
    plain = unwrap(model)
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters(remove_duplicate=False)}
    full = full_tensors(plain, {name: value for name, value in gradients.items() if value is not None})
    return {name: full.get(name) for name in gradients}


def full_tensors(
    model: nn.Module, held: Mapping[str, torch.Tensor], device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """Gather full tensors from what this worker holds per parameter: values, gradients or optimizer states.

    ``device``: where gathered tensors are put, one after another, because a worker's device may not fit the full model.
    """
    layouts = shard_layouts(unwrap(model))
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


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load this worker's shards of a plain model's ``state_dict``, in place; the names must match exactly."""
    plain = unwrap(model)
    targets = plain.state_dict()
    missing, unexpected = sorted(targets.keys() - state.keys()), sorted(state.keys() - targets.keys())
    if missing or unexpected:
        raise UsageError(
            f"the state does not match {type(plain).__name__}: {len(missing)} missing names {missing[:3]}, "
            f"{len(unexpected)} unexpected names {unexpected[:3]}"
        )
    layouts = shard_layouts(plain)
    for name, target in targets.items():
        value = state[name].to(device=target.device, dtype=target.dtype)
        if name in layouts:
            value = layouts[name].shard(value)
        if value.shape != target.shape:
            raise UsageError(
                f"{name} has shape {list(value.shape)} in the state, but {list(target.shape)} in {type(plain).__name__}"
            )
        if isinstance(target, DTensor):
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(value)


def unwrap(model: Any) -> nn.Module:
    """Return the module inside a DistributedDataParallel wrapper, or the module itself."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(module, nn.Module)
    return module
