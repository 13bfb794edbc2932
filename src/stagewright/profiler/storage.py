"""Tensors inside arbitrary arguments and results, and the storages behind them.

Memory is counted by storage: views, expanded masks and a tensor that is saved twice occupy their storage once, and a
small view keeps its whole storage alive.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import nn

from stagewright import structure


def tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors in a nested value, in order."""
    return structure.tensors(value)


def copy_with_tensors(value: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """Copy a structure with its tensors replaced, in the order of `tensors_in`."""
    replacements = iter(tensors)
    return structure.map_tensors(lambda _: next(replacements), value)


def storage_of(tensor: torch.Tensor) -> tuple[Hashable, int, object]:
    """Return the identity and bytes of a tensor's storage, and an object that keeps the identity valid.

    The identity is an address, which torch reuses as soon as the storage is freed. Of a tensor that workers divide, it
    is the storage of this worker's part.
    """
    if hasattr(tensor, "to_local"):
        with torch.no_grad():
            tensor = tensor.to_local()
    try:
        storage = tensor.untyped_storage()
        return (str(tensor.device), storage.data_ptr()), storage.nbytes(), storage
    except (NotImplementedError, RuntimeError):  # sparse and opaque tensors have no storage
        return ("tensor", id(tensor)), tensor.numel() * tensor.element_size(), tensor


def storages_of(
    tensors: Iterable[torch.Tensor], without: Iterable[Hashable] = ()
) -> tuple[dict[Hashable, int], list[object]]:
    """Return the bytes of each non-empty storage behind the tensors, and the objects that keep them alive."""
    excluded = frozenset(without)
    sizes: dict[Hashable, int] = {}
    alive: list[object] = []
    for tensor in tensors:
        key, num_bytes, storage = storage_of(tensor)
        if num_bytes and key not in excluded:
            sizes[key] = num_bytes
            alive.append(storage)
    return sizes, alive


def model_storages(model: nn.Module) -> frozenset[Hashable]:
    """Return the identities of the storages of a model's parameters and buffers."""
    return frozenset(storages_of([*model.parameters(), *model.buffers()])[0])


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Sum the bytes of the tensors' elements, each tensor once; an expanded tensor counts its storage."""
    unique = {id(tensor): tensor for tensor in tensors}.values()
    return sum(min(tensor.numel() * tensor.element_size(), storage_of(tensor)[1]) for tensor in unique)
