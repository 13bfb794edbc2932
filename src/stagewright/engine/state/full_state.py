"""The plain model's values, whatever the strategy: full tensors under the model's own names, and back again.

    held by a worker                                        full
    DistributedDataParallel's "module.…"                    the name without it
    a DTensor sharded over the data axis (FSDP2)            gathered over that axis
    a part of a layer split over the tensor axis            gathered over that axis, sections put back in order

Gathering talks: every worker of the axes must call the same function on the same module. Works on a stage too: it has
the names of its units. Where FSDP2 is in use ask the wrapped module, for the model it was made of keeps stale tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from stagewright.engine.tensor.layers import ShardLayout, shards_of
from stagewright.errors import UsageError

__all__ = ["full_gradients", "full_state_dict", "full_value", "full_values", "load_full_state_dict", "unwrapped"]


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the plain model's ``state_dict`` would hold."""
    plain = unwrapped(model)
    return full_values(plain, {name: value.detach() for name, value in plain.state_dict().items()})


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Gradients under the plain model's names, a tied one under each of its names; ``None`` where there is none."""
    plain = unwrapped(model)
    found = {name: parameter.grad for name, parameter in plain.named_parameters(remove_duplicate=False)}
    full = full_values(plain, {name: value for name, value in found.items() if value is not None})
    return {name: full.get(name) for name in found}


def full_values(
    model: nn.Module, held: Mapping[str, torch.Tensor], place: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """Full tensors from what this worker holds for a parameter: its value, its gradient or an optimiser's averages.

    ``place``: where what is gathered goes, one tensor after the other, for a device may not hold the whole model.
    """
    shards = shards_of(unwrapped(model))
    full: dict[int, torch.Tensor] = {}
    for name, value in held.items():
        if id(value) not in full:
            full[id(value)] = full_value(value, shards.get(name), place)
    return {name: full[id(value)] for name, value in held.items()}


def full_value(
    value: torch.Tensor, layout: ShardLayout | None = None, place: torch.device | None = None
) -> torch.Tensor:
    """One full tensor from the part that this worker holds, put together in a place; itself where it is whole."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    if layout is not None and whole.ndim:
        return layout.full(whole, place)
    return whole if whole is value or place is None else whole.to(place)


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Take this worker's part of a plain model's ``state_dict``, in place; names must be the same on both sides."""
    plain = unwrapped(model)
    own = plain.state_dict()
    missing, strange = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or strange:
        raise UsageError(
            f"the state does not fit {type(plain).__name__}: {len(missing)} names are missing {missing[:3]}, "
            f"{len(strange)} are strange {strange[:3]}"
        )
    shards = shards_of(plain)
    for name, target in own.items():
        value = state[name].to(device=target.device, dtype=target.dtype)
        if name in shards:
            value = shards[name].part(value)
        if value.shape != target.shape:
            raise UsageError(
                f"{name} has shape {list(value.shape)} in the state, but {list(target.shape)} in {type(plain).__name__}"
            )
        if isinstance(target, DTensor):
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(value)


def unwrapped(model: Any) -> nn.Module:
    """The module inside a data-parallel wrapper, or itself."""
    found = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(found, nn.Module)
    return found
