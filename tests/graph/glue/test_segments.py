"""What lies between units, in pieces: they do what the model does there, and go with the stage that runs them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stagewright.graph import UnitGraph, capture
from stagewright.graph.glue.operations import is_view


class Skips(nn.Module):
    """A small U-Net: a pooled value goes on, and what it was pooled from is needed again."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, padding=1)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        wide = F.interpolate(self.middle(F.max_pool2d(skip, 2)), scale_factor=2)
        return self.up(torch.cat([wide, skip], 1)).sigmoid()


class Chain(nn.Module):
    """Pooling makes what is sent smaller, so that the sender does it; the factor is random, and drawn once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x * 2).mean((2, 3)))


def pieces_of(
    model: nn.Module, example: torch.Tensor
) -> tuple[UnitGraph, list[tuple[int, nn.Module, tuple[Any, ...]]]]:
    graph = capture(model, (example,), units="leaf")
    return graph, [(one.unit, one.module, one.args) for one in graph.record_glue((example,))]


def operations(graph: torch.fx.Graph) -> Counter[str]:
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_function" and not is_view(node))


def names(module: nn.Module) -> set[str]:
    return {name.split(".")[1] for name in operations(module._run.graph)}  # type: ignore[union-attr, arg-type]


def test_which_unit_a_piece_goes_with() -> None:
    _, pieces = pieces_of(Skips(), torch.randn(2, 3, 8, 8))
    found = [(unit, names(module)) for unit, module, _ in pieces]
    assert found[0] == (1, {"max_pool2d"}), "what it is pooled from is sent, for it is needed again"
    # A cut behind the middle sends the small one: the stage behind it makes it wide.
    assert [unit for unit, _ in found[1:]] == [2, 2]
    assert "cat" in found[1][1]
    assert found[2] == (2, {"sigmoid"}), "behind the last unit"
    _, pieces = pieces_of(Chain(), torch.randn(2, 3, 8, 8))
    assert [(unit, names(module)) for unit, module, _ in pieces] == [(0, {"mul"}), (0, {"mean"})]


@pytest.mark.parametrize("model", [Skips(), Chain()], ids=["skips", "chain"])
def test_stages_run_their_pieces(model: nn.Module) -> None:
    graph, pieces = pieces_of(model, torch.randn(2, 3, 8, 8))
    last = len(graph.calls) - 1
    every = operations(graph.stage(0, last).graph)
    assert sum((operations(module._run.graph) for _, module, _ in pieces), Counter()) == every  # type: ignore[union-attr, arg-type]
    for cut in range(last):
        for first, end in ((0, cut), (cut + 1, last)):
            own = [operations(module._run.graph) for unit, module, _ in pieces if first <= unit <= end]  # type: ignore[union-attr, arg-type]
            assert sum(own, Counter()) == operations(graph.stage(first, end).graph), f"cut {cut}"


def test_pieces_compute_what_the_model_does() -> None:
    model, example = Skips(), torch.randn(2, 3, 8, 8)
    _, pieces = pieces_of(model, example)
    given = [call.args[0] for call in capture(model, (example,), units="leaf").record((example,))]
    (pooled,) = pieces[0][1](*pieces[0][2])
    torch.testing.assert_close(pooled, given[1], rtol=0, atol=0)
    joined = pieces[1][1](*pieces[1][2])
    assert any(one.shape == given[2].shape and torch.equal(one, given[2]) for one in joined)
    (result,) = pieces[2][1](*pieces[2][2])
    torch.testing.assert_close(result, model(example), rtol=0, atol=0)
