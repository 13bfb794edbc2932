"""Models without attention under a known name, and what workers do with them in the tests of the tensor axis."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from expert_jobs import make_plan
from full_model import full_gradients, full_state_dict, load_full_state_dict
from parity_jobs import checked_traffic, model_with_loss
from tensor_jobs import max_relative_error, perturb, worst
from torch import nn
from torch.nn import functional

from stagewright.engine.tensor.apply import apply_tensor_parallel
from stagewright.zoo.model import Batch


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


class Called(nn.Module):
    """A feed-forward layer whose code calls dropout; no module and no attribute has its rate."""

    def __init__(self, width: int, *, asks: bool) -> None:
        super().__init__()
        self.first, self.last, self.asks = nn.Linear(width, 48), nn.Linear(48, width), asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.first(x))
        if self.training or not self.asks:
            y = functional.dropout(y, 0.3, self.training)
        return x + self.last(y)


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


class Excited(nn.Module):
    """An inverted residual with squeeze-and-excitation, as in MobileNetV3."""

    def __init__(self, width: int, *, mean: bool) -> None:
        super().__init__()
        self.expand, self.norm = nn.Conv2d(width, 32, 1, bias=False), nn.BatchNorm2d(32)
        self.depthwise, self.depthwise_norm = nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.BatchNorm2d(32)
        self.squeeze, self.excite = nn.Conv2d(32, 6, 1), nn.Conv2d(6, 32, 1)
        self.pool = None if mean else nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.2)  # of what all workers hold
        self.project, self.project_norm = nn.Conv2d(32, width, 1), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.hardswish(self.norm(self.expand(x)))
        y = functional.hardswish(self.depthwise_norm(self.depthwise(y)))
        pooled = y.mean((2, 3), keepdim=True) if self.pool is None else self.pool(y)
        gate = self.excite(self.dropout(functional.relu(self.squeeze(pooled))))
        return x + self.dropout(self.project_norm(self.project(y * torch.sigmoid(gate))))


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


class Logits(nn.Module):
    """An image model of transformers that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=x).logits  # type: ignore[no-any-return]


def build_pretrained(name: str) -> nn.Module:
    """Build a tiny EfficientNet or RegNet-Y of transformers, with random weights."""
    import transformers as hf

    if name == "regnet-y":
        config = hf.RegNetConfig(
            embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], groups_width=4, layer_type="y", num_labels=5
        )
        return Logits(hf.RegNetForImageClassification(config))
    config = hf.EfficientNetConfig(
        image_size=32, width_coefficient=0.25, depth_coefficient=0.1, hidden_dim=320, num_labels=5
    )
    return Logits(hf.EfficientNetForImageClassification(config))


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a model in train mode, and a batch."""
    torch.manual_seed(0)
    if name == "perceptron":
        layers = [nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 6)]
        return nn.Sequential(*layers), torch.randn(5, 8)
    if name == "gated":
        return nn.Sequential(nn.Linear(8, 16), Gated(16), Gated(16)), torch.randn(3, 7, 8)
    if name == "called dropout":
        layers = [nn.Linear(8, 16), Called(16, asks=False), Called(16, asks=True)]
        return nn.Sequential(*layers), torch.randn(5, 8)
    if name == "convolutions":
        layers = [nn.Conv2d(3, 8, 3), Inverted(8), Inverted(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
        return nn.Sequential(*layers), torch.randn(6, 3, 10, 10)
    if name == "excitation":
        layers = [nn.Conv2d(3, 8, 3), Excited(8, mean=True), Excited(8, mean=False), nn.AdaptiveAvgPool2d(1)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 4)), torch.randn(6, 3, 10, 10)
    if name in ("efficientnet", "regnet-y"):
        return build_pretrained(name), torch.randn(4, 3, 32, 32)
    if name == "attention":
        blocks = [Attending(16, batch_first=True), Attending(16, batch_first=True)]
        return nn.Sequential(nn.Linear(8, 16), *blocks), torch.randn(3, 7, 8)
    if name == "attention, length first":
        return nn.Sequential(nn.Linear(8, 16), Attending(16, batch_first=False)), torch.randn(7, 3, 8)
    assert name == "encoder"
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(3, 7, 16)


class Classifier(nn.Module):
    """An image model with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(x)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def parity(rank: int, name: str, mesh: str, **more: Any) -> dict[str, Any]:
    """Check the parity of a plan of an image model in float64, where kinks do not matter."""
    module, _ = build(name)
    perturb(module.double())

    def make(count: int) -> Batch:
        generator = torch.Generator().manual_seed(count)
        images = torch.randn(count, 3, 32, 32, generator=generator, dtype=torch.float64)
        return Batch(args=(), kwargs={"x": images, "labels": torch.arange(count) % 4})

    model = model_with_loss(name, Classifier(module), 8, make)
    model.module.train(more.get("training", True))
    plan = make_plan(mesh, model, **more)
    _, report, sent = checked_traffic(rank, plan, model, mesh, lambda runner: runner.part.tensor_axis)
    return {"report": report, "bytes": sent}


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
    after = {key: value.clone() for key, value in full_state_dict(split).items()}
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
