"""Models that do in a forward what few do, for plans that are proven: `tests.engine.support.odd_models:NAME`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stagewright.zoo.model import Batch, Model


class InPlace(nn.Module):
    """Changes what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sub_(x.mean(1, keepdim=True)).mul_(2.0)


class Centred(nn.Module):
    """Keeps a running mean of its own, which no other replica knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("centre", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.training:
            self.centre.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y


class Counting(nn.Module):
    """Gives something else each time, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.count


class Scaling(nn.Module):
    """A unit changes what it is given, and the next one takes that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.last = nn.LayerNorm(16), Router(), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.router(x) * self.last(x)  # type: ignore[no-any-return]


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x *= torch.linspace(0.5, 2.0, 16)
        return self.linear(x).sigmoid()  # type: ignore[no-any-return]


class ReadBetween(nn.Module):
    """Code between units reads a parameter that a unit holds; two units share another under several names."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(16, 16)
        self.first, self.middle, self.second = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.first.weight = self.second.weight = self.shared.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.first(x).relu())
        return self.second(x * self.middle.weight[0])  # type: ignore[no-any-return]


class Twice(nn.Module):
    """Calls one batch norm twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.norm(self.first(x)).relu()))  # type: ignore[no-any-return]


class Unused(nn.Module):
    """Its first parameter is for other uses."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(16))
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


def noisy(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that draws."""
    return nn.functional.cross_entropy(outputs + 0.1 * torch.randn_like(outputs), target)


def _with(first: nn.Module) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    model = nn.Sequential(first, nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, (torch.randn(8, 16),)


def in_place() -> tuple[nn.Module, tuple[Any, ...]]:
    return _with(InPlace())


def centred() -> tuple[nn.Module, tuple[Any, ...]]:
    return _with(Centred())


def twice() -> tuple[nn.Module, tuple[Any, ...]]:
    return _with(Twice())


def unused() -> tuple[nn.Module, tuple[Any, ...]]:
    return _with(Unused())


def counting() -> tuple[nn.Module, tuple[Any, ...]]:
    return _with(Counting())


def scaling() -> tuple[nn.Module, tuple[Any, ...]]:
    return _with(Scaling())


def read_between() -> tuple[nn.Module, tuple[Any, ...]]:
    return _with(ReadBetween())


def noisy_loss() -> Model:
    return _noisy(nn.ReLU())


def noisy_loss_and_dropout() -> Model:
    return _noisy(nn.Dropout(0.2))


def _noisy(first: nn.Module) -> Model:
    module, _ = _with(first)

    def example(size: int) -> Batch:
        rows = torch.randn(size, 16, generator=torch.Generator().manual_seed(1))
        return Batch(args=(rows,), target=torch.arange(size) % 4)

    batch = example(8)
    return Model(
        name="noisy",
        module=module,
        args=batch.args,
        target=batch.target,
        loss=noisy,
        batch_size=8,
        make_example=example,
    )


class Branching(nn.Module):
    """Branches on values between its submodules, so it can't be cut; not every sample uses every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.left(x) if x.mean() > 0 else self.right(x)
        return {"hidden": x, "logits": self.last(self.dropout(x).relu())}


class Detector(nn.Module):
    """As torchvision's detectors: takes lists, checks boxes by value, trains on those candidates that match one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Linear(8, 5)

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        for target in targets:
            if (target["boxes"][:, 2:] <= target["boxes"][:, :2]).any():
                raise ValueError("a box has no area")
        candidates = self.body(torch.stack(images)).relu().flatten(2).transpose(1, 2)
        scores, boxes = [], []
        for candidate, target in zip(candidates, targets, strict=True):
            found = self.head(candidate)
            matched = torch.cdist(found[:, 1:].detach(), target["boxes"]).min(1)
            positive = matched.values < matched.values.median()
            scores.append(nn.functional.binary_cross_entropy_with_logits(found[:, 0], positive.float()))
            boxes.append((found[positive, 1:] - target["boxes"][matched.indices[positive]]).abs().mean())
        return {"scores": torch.stack(scores).mean(), "boxes": torch.stack(boxes).mean()}


class Detection(nn.Module):
    """A detector behind tensors with the batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.detector = Detector()

    def forward(self, images: torch.Tensor, boxes: torch.Tensor) -> dict[str, torch.Tensor]:
        losses = self.detector(list(images), [{"boxes": box} for box in boxes])
        return {"loss": losses["scores"] + losses["boxes"]}


@dataclass(frozen=True, slots=True)
class State:
    """What layers of ``Stateful`` pass on: a tensor, and a number that it determines."""

    value: torch.Tensor
    largest: float


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, state: State) -> State:
        value = self.linear(state.value).tanh() / state.largest
        return State(value, float(value.detach().abs().max()))


class Objects(nn.Module):
    """Units take and return objects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(Stateful() for _ in range(4)), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = State(x, 1.0)
        for layer in self.layers:
            state = layer(state)
        return self.last(state.value) * state.largest  # type: ignore[no-any-return]


def branching() -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return Branching(), (torch.randn(8, 16),)


def detection() -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    corners = torch.rand(8, 2, 2)
    return Detection(), (torch.rand(8, 3, 8, 8), torch.cat([corners, corners + 0.1 + torch.rand(8, 2, 2)], dim=2))


def objects() -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return Objects(), (torch.randn(8, 16),)


UNUSUAL_PLANS: list[tuple[str, str, dict[str, Any]]] = [
    ("in_place", "serial", {"microbatches": 2}),
    ("branching", "data=2", {"microbatches": 2, "shard": True}),
    ("twice", "serial", {"microbatches": 2, "batch_norm": "deferred"}),
    ("objects", "pipeline=2", {"microbatches": 3}),
]
"""A model of this file, a mesh and options of a plan, for tests of what happens to its units."""
