"""Samples of a task in the memory of a worker's device, and batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from accuracy_runs.cases import Recipe
from accuracy_runs.store import read_images, read_text
from stagewright.zoo import Batch

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_HELD_OUT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Samples on a device: one tensor for each input, and labels."""

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    size: int
    """Pixels that images are scaled to; 0 for text."""

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: torch.Tensor, generator: torch.Generator | None = None) -> Batch:
        """Return samples as a batch; with a generator, half of the images are mirrored."""
        chosen = {name: values[indices] for name, values in self.inputs.items()}
        if not self.size:
            return Batch(args=(chosen.pop("input_ids"),), kwargs=chosen, target=self.labels[indices])
        images = chosen["images"].float() / 255
        if generator is not None:
            mirrored = torch.rand(len(images), 1, 1, 1, generator=generator, device=images.device) < 0.5
            images = torch.where(mirrored, images.flip(3), images)
        scaled = functional.interpolate(images, size=(self.size, self.size), mode="bilinear", align_corners=False)
        mean, std = (torch.tensor(values, device=images.device).view(1, 3, 1, 1) for values in (_MEAN, _STD))
        return Batch(args=((scaled - mean) / std,), target=self.labels[indices])

    def take(self, indices: Sequence[int]) -> Split:
        """Return some of the samples."""
        chosen = torch.tensor(indices, device=self.labels.device)
        inputs = {name: values[chosen] for name, values in self.inputs.items()}
        return Split(inputs=inputs, labels=self.labels[chosen], size=self.size)


def load_splits(store: Path, recipe: Recipe, device: torch.device) -> tuple[Split, Split]:
    """Read the training and the evaluation samples of a task."""
    names = ("train", "test" if recipe.samples == "cifar10" else "validation")
    first, second = (_load(store, recipe, name, device) for name in names)
    return first, second


def hold_out(train: Split) -> tuple[Split, Split]:
    """Return all training samples but every tenth, and every tenth."""
    numbers = range(len(train))
    kept = [number for number in numbers if number % _HELD_OUT]
    return train.take(kept), train.take(list(numbers[::_HELD_OUT]))


def _load(store: Path, recipe: Recipe, split: str, device: torch.device) -> Split:
    arrays: dict[str, Any]
    if recipe.samples == "cifar10":
        images, labels = read_images(store, split)
        arrays, size = {"images": images}, recipe.size
    else:
        arrays = read_text(store, recipe.samples, split)
        labels, size = arrays.pop("labels"), 0
        arrays = {name: np.ascontiguousarray(values[:, : recipe.size]) for name, values in arrays.items()}
    inputs = {name: torch.from_numpy(values).to(device) for name, values in arrays.items()}
    return Split(inputs=inputs, labels=torch.from_numpy(labels).to(device), size=size)
