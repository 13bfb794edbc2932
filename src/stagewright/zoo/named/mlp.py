"""The multilayer perceptron whose gradients the fabric study sends over a network, layer by layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stagewright.zoo.blueprint import Blueprint, Options
from stagewright.zoo.model import ImageInput
from stagewright.zoo.named.catalog import Entry


class MnistPerceptron(nn.Module):
    """784-256-128-64-10 with ReLU; gradients of fc1..fc4 are 803840, 131584, 33024 and 2600 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 256)
        self.fc2 = nn.Linear(256, 128)
        self.fc3 = nn.Linear(128, 64)
        self.fc4 = nn.Linear(64, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Compute the logits of ten classes from (batch, 784) pixels."""
        hidden = torch.relu(self.fc1(pixels))
        hidden = torch.relu(self.fc2(hidden))
        hidden = torch.relu(self.fc3(hidden))
        logits: torch.Tensor = self.fc4(hidden)
        return logits


def _make(config: Any) -> nn.Module:
    return MnistPerceptron()


def build(entry: Entry, options: Options, layers: int | None) -> Blueprint:
    """Create the blueprint of `mlp-mnist`, which has no options."""
    return Blueprint(
        make=_make,
        config=None,
        inputs=ImageInput(channels=1, size=28, mean=(0.1307,), std=(0.3081,), flatten=True),
        objective="classify",
        num_classes=10,
    )
