"""Models without attention under a known name, and what workers do with them in the tests of the tensor axis."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from full_model import full_gradients, full_state_dict, load_full_state_dict
from tensor_jobs import max_relative_error, perturb, worst
from torch import nn
from torch.nn import functional

from stagewright.engine.tensor.apply import apply_tensor_parallel


class Gated(nn.Module):
    """A feed-forward layer with a gate, under names of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.first, self.last = nn.Linear(width, 48), nn.Linear(width, 48), nn.Linear(48, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.last(self.dropout(functional.silu(self.gate(y)) * self.first(y)))


class Inverted(nn.Module):
    """An inverted residual with every layer that has weights of its own for each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand, self.norm = nn.Conv2d(width, 32, 1), nn.GroupNorm(4, 32)
        self.grouped, self.batch_norm = nn.Conv2d(32, 32, 3, padding=1, groups=8), nn.BatchNorm2d(32)
        self.project, self.dropout = nn.Conv2d(32, width, 3, padding=1), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu6(self.norm(self.expand(x)))
        y = functional.max_pool2d(self.batch_norm(self.grouped(y)).relu_(), 3, stride=1, padding=1)
        return x + self.dropout(self.project(y))


class Attending(nn.Module):
    """A block with torch's own attention, whose averaged weights are used, and masks of both kinds."""

    def __init__(self, width: int, *, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=batch_first)
        self.layers = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, width))
        self.norm = nn.LayerNorm(width)
        self.length_dim = 1 if batch_first else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        length, size = x.shape[self.length_dim], x.shape[1 - self.length_dim]
        padding = (torch.arange(length) >= length - 1).expand(size, -1)
        attended, weights = self.attention(y, y, y, key_padding_mask=padding)
        generator = torch.Generator().manual_seed(3)
        per_head = torch.randn(4 * size, length, length, generator=generator, dtype=x.dtype)
        again, _ = self.attention(y, y, y, attn_mask=per_head, need_weights=False)
        return x + attended + again + self.layers(y) + weights.mean()


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a model in train mode, and a batch."""
    torch.manual_seed(0)
    if name == "perceptron":
        layers = [nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 6)]
        return nn.Sequential(*layers), torch.randn(5, 8)
    if name == "gated":
        return nn.Sequential(nn.Linear(8, 16), Gated(16), Gated(16)), torch.randn(3, 7, 8)
    if name == "convolutions":
        layers = [nn.Conv2d(3, 8, 3), Inverted(8), Inverted(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
        return nn.Sequential(*layers), torch.randn(6, 3, 10, 10)
    if name == "attention":
        blocks = [Attending(16, batch_first=True), Attending(16, batch_first=True)]
        return nn.Sequential(nn.Linear(8, 16), *blocks), torch.randn(3, 7, 8)
    if name == "attention, length first":
        return nn.Sequential(nn.Linear(8, 16), Attending(16, batch_first=False)), torch.randn(7, 3, 8)
    assert name == "encoder"
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(3, 7, 16)


def step(rank: int, name: str) -> dict[str, Any]:
    """Run a step in float64 with and without tensor parallelism, then evaluate; return the relative errors."""
    serial, x = build(name)
    serial, x = serial.double(), x.double()
    perturb(serial)
    split = copy.deepcopy(serial)
    state = {key: value.clone() for key, value in serial.state_dict().items()}
    apply_tensor_parallel(split, dist.group.WORLD)
    same = all(torch.equal(value, state[key]) for key, value in full_state_dict(split).items())
    outputs = []
    for model in (split, serial):
        torch.manual_seed(5)  # the same dropout masks
        output = model(x)
        (
            output.square() * torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view_as(output)
        ).mean().backward()
        outputs.append(output.detach())
    after = full_state_dict(split)
    changed = {key: value for key, value in serial.state_dict().items() if "running" in key}
    with torch.no_grad():
        evaluated = max_relative_error(split.eval()(x), serial.eval()(x))
    gradients = worst(full_gradients(split), full_gradients(serial))
    load_full_state_dict(split, {key: value + 1 for key, value in state.items()})
    return {
        "outputs": max_relative_error(*outputs),
        "gradients": gradients,
        "buffers": max([max_relative_error(after[key], value) for key, value in changed.items()], default=0.0),
        "evaluated": evaluated,
        "same_state": same,
        "loads": all(torch.equal(value, state[key] + 1) for key, value in full_state_dict(split).items()),
        "share": sum(p.numel() for p in split.parameters()) / sum(p.numel() for p in serial.parameters()),
    }
