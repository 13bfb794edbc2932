"""The parameters of units are hidden from export, unless the code between units reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from stagewright.graph import capture
from stagewright.graph.tracing.hidden_state import run_with_hidden_state


class Blocks(nn.Module):
    """An embedding, some blocks and a bias of its own; subclasses read the state of units between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        layer = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(layer if i == 3 else nn.Linear(8, 8), nn.Tanh()) for i in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids)) + self.bias
        for block in self.blocks:
            x = block(x)
        return self.end(x)

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Tied(Blocks):
    def end(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.embed.weight)


class FirstDtype(Blocks):
    def end(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(next(self.parameters()).dtype) * sum(p.requires_grad for p in self.blocks.parameters())


class ReadsBuffer(Blocks):
    def end(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.norm.running_mean + self.norm.weight * self.blocks[1][0].bias


class CatchesErrors(Blocks):
    def end(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return x * self.blocks[2][0].weight.sum()
        except Exception:
            return x


class AsksForAttributes(Blocks):
    def end(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if hasattr(self.norm, "weight") and not hasattr(self.norm, "missing") else x


class WritesBuffer(Blocks):
    def end(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.num_batches_tracked.add_(3)
        return x


@pytest.mark.parametrize(
    "kind", [Blocks, Tied, FirstDtype, ReadsBuffer, CatchesErrors, AsksForAttributes, WritesBuffer]
)
@pytest.mark.parametrize("training", [True, False])
def test_state_that_is_read_between_units(same_as: Callable[..., Any], kind: type[Blocks], training: bool) -> None:
    torch.manual_seed(0)
    model = kind().train(training)
    registries = [(id(module._parameters), id(module._buffers)) for module in model.modules()]
    ids = torch.randint(16, (4,))
    graph = capture(model, (ids,))
    for size in (4, 7):
        same_as(model, graph, (torch.randint(16, (size,)),))
    assert [(id(module._parameters), id(module._buffers)) for module in model.modules()] == registries


@pytest.mark.parametrize(("kind", "num_exported"), [(Blocks, 1), (Tied, 2), (ReadsBuffer, 7 + 8)])
def test_export_gets_only_state_that_is_read(kind: type[Blocks], num_exported: int) -> None:
    """``ReadsBuffer`` reads a second module when the first is shown, so everything is."""
    torch.manual_seed(0)
    with mock.patch("torch.export.export", wraps=torch.export.export) as export:
        counts: list[int] = []

        def count(root: nn.Module, *args: Any, **kwargs: Any) -> Any:
            counts.append(len([*root.parameters(), *root.buffers()]))
            return mock.DEFAULT

        export.side_effect = count
        capture(kind(), (torch.randint(16, (4,)),))
    assert counts[-1] == num_exported


def test_other_errors_are_raised_once() -> None:
    model = Blocks()
    calls: list[int] = []

    def fail(_: Any) -> None:
        calls.append(len(list(model.parameters())))
        raise ValueError("other")

    with pytest.raises(ValueError, match="other"):
        run_with_hidden_state([model.embed, *model.blocks], fail)
    assert calls == [3]  # the bias, and the two of the norm, which is not a unit here
