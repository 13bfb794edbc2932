"""Weights that stay in their safetensors files until a worker reads those of its own part.

model.safetensors    model-00001-of-00004.safetensors …    a checkpoint's model/worker-*.safetensors
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from stagewright.files.stored_tensor import StoredExperts, StoredTensor, TensorPart, open_safetensors
from stagewright.zoo.checkpoint_names import locate_tensors


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files that hold the parameters and persistent buffers of a model."""

    locations: dict[str, StoredTensor | StoredExperts]
    """By name in the model, also for each name of tied tensors."""

    @classmethod
    def find(cls, folder: Path, module: nn.Module) -> WeightFiles | None:
        """Find a module's tensors in a folder; None if a name or shape differs, so that they can't be read singly."""
        located = locate_tensors(module, find_tensors(folder))
        if located is None:
            return None
        prefix = f"{getattr(module, 'base_model_prefix', '')}."
        sources: dict[int, StoredTensor | StoredExperts] = {}
        state = module.state_dict(keep_vars=True)
        for name, tensor in state.items():
            candidates = (name, name.removeprefix(prefix), prefix + name)
            key = next((candidate for candidate in candidates if candidate in located), None)
            if key is not None and located[key][1] == tuple(tensor.shape):
                sources.setdefault(id(tensor), located[key][0])
        if any(id(tensor) not in sources for tensor in state.values()):
            return None
        return cls({name: sources[id(tensor)] for name, tensor in state.items()})

    def read_buffers(self, module: nn.Module) -> None:
        """Read the persistent buffers of a module."""
        parameters = {id(parameter) for parameter in module.parameters()}
        for name, tensor in module.state_dict(keep_vars=True).items():
            if id(tensor) not in parameters:
                self.read(name, tensor)

    def read(self, name: str, target: torch.Tensor, part: TensorPart | None = None) -> None:
        """Copy a tensor, or a part of it, into ``target``."""
        self.locations[name].copy_to(target, part)


def find_tensors(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return the file and the shape of every tensor in a folder."""
    locations: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                locations[name] = (path, tuple(file.get_slice(name).get_shape()))
    return locations
