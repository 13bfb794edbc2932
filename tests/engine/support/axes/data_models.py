"""Models for tests of the data axis: tied weights, routes that some replicas skip, batch norms."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from stagewright.engine.batch.microbatch import split_sizes


class Tied(nn.Module):
    """A tied embedding and head, an unused layer, an output that the loss ignores, and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.unused = nn.Linear(5, 5)
        self.aside = nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden)) * self.scale
        return self.head(hidden), self.aside(hidden)


class Ways(nn.Module):
    """Routes each sample to one of two layers by its sign; a layer without samples is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(x)
        for positive, way in enumerate(self.ways):
            rows = ((sign > 0) == bool(positive)).nonzero()[:, 0]
            if len(rows):
                output = output.index_add(0, rows, way(x[rows]))
        return output


class Routed(nn.Module):
    """A model with data-dependent routing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.routed = Ways()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.routed(self.first(x), x[:, 0]))


class Picking(nn.Module):
    """Two layers, of which the first sample of a batch selects one: backward does not reach the other. The head changes
    its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=bias) for bias in (False, True))
        self.head = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        outputs = [layer(hidden) for layer in self.layers]
        return self.head(outputs[int(x[0, 0] > 0)])


class Passing(nn.Module):
    """A last layer that only positive samples pass, with or without a skip connection. Backward may not reach it;
    without the skip connection it may reach nothing at all."""

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.skip = skip
        self.first = nn.Linear(4, 3)
        self.last = Chosen()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        output = self.last(hidden, x[:, 0])
        return hidden + output if self.skip else output


class Chosen(nn.Module):
    """A layer for positive samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
        rows = (sign > 0).nonzero()[:, 0]
        output = torch.zeros_like(x)
        return output.index_add(0, rows, self.layer(x[rows])) if len(rows) else output


class Normed(nn.Module):
    """A convolution and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.convolution(x))).mean((2, 3)))


ROUTED: dict[str, Callable[[], nn.Module]] = {
    "routed": Routed,
    "picking": Picking,
    "passing": lambda: Passing(skip=True),
    "ending": lambda: Passing(skip=False),
}


def build(name: str, batch: int, step: int = 0) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    if name == "tied":
        return Tied(), torch.randint(0, 11, (batch, 5)), torch.randint(0, 11, (batch, 5))
    if name in ROUTED:
        signs = torch.ones(batch, 1)  # in step 2 all samples take one route
        if step == 0:  # each replica uses both routes
            signs[::2] = -1
        elif step != 2:  # the first replica uses another route than all others
            signs[: split_sizes(batch, dist.get_world_size())[0]] = -1
        return ROUTED[name](), torch.rand(batch, 4) * signs, torch.randint(0, 3, (batch,))
    assert name == "normed"
    return Normed(), torch.randn(batch, 2, 6, 6), torch.randint(0, 3, (batch,))


class Series(nn.Module):
    """A sequence of layers that only some samples pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.layers = nn.ModuleList(Chosen() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for index, layer in enumerate(self.layers):
            hidden = hidden + layer(hidden, x[:, index])
        return hidden
