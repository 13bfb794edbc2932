"""Weights that stay in their safetensors files until a worker reads those of its own part.

model.safetensors    model-00001-of-00004.safetensors …    a checkpoint's model/worker-*.safetensors
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stagewright.errors import UsageError

_PIECE_BYTES = 64 * 2**20
"""Bytes that are mapped at once: pages of a mapped file count as the memory of a process."""


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files that hold the parameters and persistent buffers of a model."""

    locations: dict[str, tuple[Path, str]]
    """By name in the model, also for each name of tied tensors: the file, and the name there."""

    @classmethod
    def find(cls, folder: Path, module: nn.Module) -> WeightFiles | None:
        """Find a module's tensors in a folder; None if a name or shape differs, so that they can't be read singly."""
        locations = _locations(folder)
        prefix = f"{getattr(module, 'base_model_prefix', '')}."
        sources: dict[int, tuple[Path, str]] = {}
        state = module.state_dict(keep_vars=True)
        for name, tensor in state.items():
            candidates = (name, name.removeprefix(prefix), prefix + name)
            key = next((candidate for candidate in candidates if candidate in locations), None)
            if key is not None and locations[key][1] == tuple(tensor.shape):
                sources.setdefault(id(tensor), (locations[key][0], key))
        if any(id(tensor) not in sources for tensor in state.values()):
            return None
        return cls({name: sources[id(tensor)] for name, tensor in state.items()})

    def read_buffers(self, module: nn.Module) -> None:
        """Read the persistent buffers of a module."""
        parameters = {id(parameter) for parameter in module.parameters()}
        for name, tensor in module.state_dict(keep_vars=True).items():
            if id(tensor) not in parameters:
                self.read(name, tensor)

    @torch.no_grad()
    def read(
        self, name: str, target: torch.Tensor, shard: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        """Copy a tensor, or the shard of it that ``shard`` selects, into ``target``."""
        path, key = self.locations[name]
        if shard is not None:
            with _open(path) as file:
                target.copy_(shard(file.get_tensor(key)))
            return
        rows = max(1, _PIECE_BYTES * target.shape[0] // max(1, target.nbytes)) if target.ndim else 0
        for start in range(0, target.shape[0], rows) if target.ndim else ():
            with _open(path) as file:  # closed after each piece, so that its pages are unmapped
                target[start : start + rows].copy_(file.get_slice(key)[start : start + rows])
        if not target.ndim:
            with _open(path) as file:
                target.copy_(file.get_tensor(key))


def _locations(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return the file and the shape of every tensor in a folder."""
    locations: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                locations[name] = (path, tuple(file.get_slice(name).get_shape()))
    return locations


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError, MemoryError) as error:
        raise UsageError(f"{str(path)!r} is not a safetensors file: {error}") from None
