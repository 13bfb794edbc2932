"""The tiny models of the verify benchmark, their batches and the plain training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import stagewright as sw

BATCH, LENGTH, WIDTH, VOCABULARY, HEADS = 8, 6, 16, 24, 4
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a training step is made of; baseline and candidate share it."""

    model: str = "text"
    seed: int = 0
    dtype: str = "float32"
    tied: bool = False
    dropout: float = 0.0
    padded: bool = False
    clip: float = 0.0
    optimizer: str = "sgd"
    forward_only: bool = False
    batch: int = BATCH


class Attention(nn.Module):
    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp, self.drop = nn.LayerNorm(WIDTH), Mlp(), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), mask)
        return x + self.drop(self.mlp(self.norm2(x)))


class Text(nn.Module):
    """A transformer with learned positions and the longest length seen as a buffer."""

    def __init__(self, *, tied: bool = False, dropout: float = 0.0, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH + 2, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("seen", torch.zeros(()))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None, offset: int = 0) -> torch.Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]) + offset)
        if self.training:
            self.seen.fill_(ids.shape[1])
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def build(setting: Setting) -> nn.Module:
    """Build the plain model."""
    torch.manual_seed(setting.seed)
    model: nn.Module
    if setting.model == "norm":
        model = nn.Sequential(
            nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
        )
    elif setting.model == "stack":
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        model = nn.Sequential(*layers, nn.Linear(WIDTH, 4))
    else:
        model = Text(tied=setting.tied, dropout=setting.dropout)
        nn.init.normal_(model.embed.weight, std=0.5)
    return model.to(getattr(torch, setting.dtype))


def make_batch(setting: Setting) -> dict[str, torch.Tensor]:
    """Return the global batch: inputs, labels, and a mask of valid tokens if sequences are padded."""
    generator = torch.Generator().manual_seed(1000 + setting.seed)
    if setting.model != "text":
        inputs = torch.randn(setting.batch, WIDTH, generator=generator).to(getattr(torch, setting.dtype))
        return {"inputs": inputs, "labels": torch.randint(4, (setting.batch,), generator=generator)}
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    if not setting.padded:
        return {"inputs": ids, "labels": labels}
    lengths = torch.tensor([LENGTH, LENGTH, LENGTH - 1, LENGTH, 2, 3, 2, 4])
    mask = torch.arange(LENGTH) < lengths[:, None]
    return {"inputs": ids, "mask": mask, "labels": labels.masked_fill(~mask, IGNORED)}


def run_model(model: Any, batch: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """Call the model on its part of the batch."""
    if "mask" in batch:
        options["mask"] = batch["mask"]
    return model(batch["inputs"], **options)


def loss_of(output: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Return the mean cross-entropy over valid tokens."""
    return F.cross_entropy(output.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction=reduction)


def make_optimizer(model: nn.Module, setting: Setting, *, decay_all: bool = False, factor: float = 1.0) -> Any:
    """AdamW with weight decay on matrices only, or SGD."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if setting.optimizer == "sgd" or not parameters:
        return torch.optim.SGD(parameters, lr=0.1 * factor)
    matrices = [p for p in parameters if p.ndim > 1 or decay_all]
    others = [p for p in parameters if p.ndim <= 1 and not decay_all]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01 * factor)


def serial_step(setting: Setting, folder: str | None = None) -> None:
    """Train the plain model for one step: the baseline."""
    model, batch = build(setting), make_batch(setting)
    optimizer = make_optimizer(model, setting)
    with sw.verify(model, step=0, folder=folder):
        if setting.forward_only:
            with torch.no_grad():
                run_model(model, batch)
            return
        torch.manual_seed(setting.seed + 7)  # of dropout
        loss_of(run_model(model, batch), batch["labels"]).backward()
        if setting.clip:
            nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        optimizer.step()
