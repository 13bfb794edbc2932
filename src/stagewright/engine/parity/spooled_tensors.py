"""Named tensors in files: a mapping that holds none of them in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch


class SpooledTensors(Mapping[str, torch.Tensor]):
    """Tensors of a folder, each read when it is looked up and not kept."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is created; the caller removes it."""
        folder.mkdir(parents=True)
        self._folder = folder
        self._files: dict[str, Path] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor."""
        path = self._folder / f"{len(self._files)}.pt"
        torch.save(tensor.detach().cpu().clone(memory_format=torch.contiguous_format), path)
        self._files[name] = path

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = torch.load(self._files[name], weights_only=True)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
