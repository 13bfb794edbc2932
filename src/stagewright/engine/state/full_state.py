"""Full tensors of a model, for any strategy.

    held by a worker                                        full
    a DTensor sharded over the data axis (FSDP2)            all-gathered over that axis
    a tensor-parallel shard                                 all-gathered over the tensor axis, sections in order

Gathering is collective: every worker of the axes must call the same function on the same module. It works on a stage
too, which has the names of its units. With FSDP2 pass the wrapped module: the original model keeps stale tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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


class LazyTensors(Mapping[str, torch.Tensor]):
    """Full tensors by name, each gathered when it is looked up and not kept.

    Every worker of the axes must look up the same names in the same order.
    """

    def __init__(self, model: nn.Module, held: Mapping[str, torch.Tensor], device: torch.device | None = None) -> None:
        self._held, self._layouts, self._device = held, shard_layouts(model), device

    def __getitem__(self, name: str) -> torch.Tensor:
        return full_tensor(self._held[name], self._layouts.get(name), self._device)

    def __contains__(self, name: object) -> bool:
        return name in self._held  # without a collective

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def full_tensor(
    value: torch.Tensor, layout: ShardLayout | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """Gather one full tensor from this worker's shard, on ``device``; return the tensor itself if it is full."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    if layout is not None and whole.ndim:
        return layout.gather(whole, device)
    return whole if whole is value or device is None else whole.to(device)
