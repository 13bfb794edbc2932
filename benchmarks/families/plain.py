"""Plain modules with features of users' models: skips, repeated layers, dictionaries, control flow, buffers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from families.family import Arguments, Family

__all__ = ["PLAIN"]


class DoubleConvolution(nn.Sequential):
    """Two convolutions with batch norm."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(
            nn.Conv2d(inner, outer, 3, padding=1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
            nn.Conv2d(outer, outer, 3, padding=1),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Down, up, and a skip at every level."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([DoubleConvolution(3, 8), DoubleConvolution(8, 16), DoubleConvolution(16, 32)])
        self.bottom = DoubleConvolution(32, 64)
        self.grow = nn.ModuleList([nn.ConvTranspose2d(2 * size, size, 2, stride=2) for size in (32, 16, 8)])
        self.up = nn.ModuleList([DoubleConvolution(2 * size, size) for size in (32, 16, 8)])
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([skips.pop(), grow(x)], dim=1))
        result: torch.Tensor = self.head(x)
        return result


class TransformerPair(nn.Module):
    """``nn.Transformer`` between an embedding and a head, batch first, with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True)
        result: torch.Tensor = self.head(hidden)
        return result


class Tagger(nn.Module):
    """A bidirectional LSTM over words, then a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.gru = nn.GRU(32, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, (_, cell) = self.lstm(self.embedding(words))
        hidden, _ = self.gru(hidden)
        return self.head(hidden), cell.transpose(0, 1)


class Shared(nn.Module):
    """One layer called four times, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        for _ in range(4):
            hidden = self.norm(self.layer(hidden))
        result: torch.Tensor = self.head(hidden)
        return result


class Named(nn.Module):
    """A unit whose inputs and outputs are a dictionary and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, state: dict[str, torch.Tensor], *, scale: float) -> tuple[dict[str, torch.Tensor], int]:
        hidden = torch.tanh(self.linear(state["hidden"])) * scale
        return {"hidden": hidden, "sum": state["sum"] + hidden.sum(-1)}, 3


class SeveralOutputs(nn.Module):
    """Dictionaries between units; a tuple, a dictionary, a number and ``None`` out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([Named() for _ in range(4)])
        self.heads = nn.ModuleDict({"class": nn.Linear(16, 5), "box": nn.Linear(16, 4)})

    def forward(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor | int | None], tuple[torch.Tensor, torch.Tensor]]:
        state = {"hidden": self.stem(x), "sum": x.sum(-1)}
        number = 0
        for index, block in enumerate(self.blocks):
            state, step = block(state, scale=1.0 + index / 4)
            number += step
        scores = self.heads["class"](state["hidden"])
        best = scores.argmax(-1)
        return (
            scores,
            {"box": self.heads["box"](state["hidden"]), "steps": number, "none": None},
            (best, state["sum"] > 0),
        )


class Router(nn.Module):
    """Branches and loops on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(16, 16)
        self.right = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.left(x) if x.mean() > 0 else self.right(x)
        while x.abs().max() > 1:
            x = x / 2
        return x


class ControlFlowInside(nn.Module):
    """Units that branch on data; the code between them does not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([Router() for _ in range(4)])
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        result: torch.Tensor = self.head(x)
        return result


class ControlFlowBetween(nn.Module):
    """Branches on data between its units, so it can't be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.sum() > 0:
            x = self.second(x)
        result: torch.Tensor = self.third(x)
        return result


class InPlaceBlock(nn.Module):
    """A residual block whose additions and activations are in place."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(size, size, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(size)
        self.second = nn.Conv2d(size, size, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(size)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.relu(self.first_norm(self.first(x)))
        hidden = self.second_norm(self.second(hidden))
        hidden += x
        result: torch.Tensor = self.relu(hidden)
        return result


class InPlaceResNet(nn.Module):
    """A ResNet with in-place code in its blocks and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.blocks = nn.ModuleList([InPlaceBlock(8) for _ in range(4)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.stem(x))
        for block in self.blocks:
            x = block(x) * 0.9
            x.add_(0.1)
        result: torch.Tensor = self.head(x.mean((2, 3)))
        return result


class Memory(nn.Module):
    """A block with a running mean and a count that change in forward."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
        result: torch.Tensor = self.linear(x - self.mean)
        return result


class ChangingBuffers(nn.Module):
    """Buffers that change inside units and in the code between them."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([Memory() for _ in range(4)])
        self.head = nn.Linear(16, 5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = torch.relu(block(x))
            if index == 1:
                self.seen += x.detach().mean()
                x = x + self.seen
        result: torch.Tensor = self.head(x)
        return result


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 32),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Linear(32, 16),
        nn.ReLU(),
        nn.Linear(16, 5),
    )


def _floats(*shape: int) -> Callable[[int], Arguments]:
    def example(batch_size: int) -> Arguments:
        generator = torch.Generator().manual_seed(600 + batch_size)
        return (torch.randn(batch_size, *shape, generator=generator),), {}

    return example


def _words(*lengths: int) -> Callable[[int], Arguments]:
    def example(batch_size: int) -> Arguments:
        generator = torch.Generator().manual_seed(700 + batch_size)
        return tuple(torch.randint(0, 50, (batch_size, length), generator=generator) for length in lengths), {}

    return example


def _plain(
    name: str, make: Callable[[], nn.Module], example: Callable[[int], Arguments], fails: str | None = None
) -> Family:
    model_class = make.__name__ if isinstance(make, type) else "nn.Sequential"
    return Family(name=name, group="plain", model_class=model_class, make=make, example=example, fails=fails)


PLAIN: tuple[Family, ...] = (
    _plain("mlp", _mlp, _floats(8)),
    _plain("u-net", UNet, _floats(3, 16, 16)),
    _plain("nn-transformer", TransformerPair, _words(9, 7)),
    _plain("lstm", Tagger, _words(9)),
    _plain("shared-weights", Shared, _words(9)),
    _plain("several-outputs", SeveralOutputs, _floats(8)),
    _plain("in-place", InPlaceResNet, _floats(3, 8, 8)),
    _plain("changing-buffers", ChangingBuffers, _floats(8)),
    _plain("control-flow-inside", ControlFlowInside, _floats(8)),
    _plain("control-flow-between", ControlFlowBetween, _floats(8), fails="plain.py:"),
)
