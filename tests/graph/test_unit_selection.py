"""Which modules become units."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stagewright.graph import capture


def unit_names(model: nn.Module, args: Any, units: Any = "auto") -> list[str]:
    return [call.name for call in capture(model, args, units=units).calls]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return x + self.down(self.act(self.up(x)))


class Stack(nn.Module):
    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Stack(), nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x))


def test_blocks_are_units_with_what_stands_before_and_after() -> None:
    graph = capture(Model(), (torch.randn(2, 4),))
    blocks = [f"body.blocks.{index}" for index in range(4)]
    assert [call.name for call in graph.calls] == ["body.stem", *blocks, "body.norm", "head"]
    assert [call.block for call in graph.calls] == [None, *blocks, None, None]
    assert [call.kind for call in graph.calls] == ["Linear", *["Block"] * 4, "LayerNorm", "Linear"]


def test_leaf_is_the_finest_cut_and_knows_the_blocks() -> None:
    graph = capture(Model(), (torch.randn(2, 4),), units="leaf")
    assert [call.name for call in graph.calls][:4] == [
        "body.stem",
        "body.blocks.0.up",
        "body.blocks.0.act",
        "body.blocks.0.down",
    ]
    assert [call.block for call in graph.calls[1:5]] == [*["body.blocks.0"] * 3, "body.blocks.1"]


def test_named_units_are_kept_whole() -> None:
    assert unit_names(Model(), (torch.randn(2, 4),), ["body"]) == ["body", "head"]
    names = unit_names(Model(), (torch.randn(2, 4),), ["body.blocks.1.up"])
    assert names[2:5] == ["body.blocks.1.up", "body.blocks.1.act", "body.blocks.1.down"]
    assert names[1] == "body.blocks.0"


def test_a_layer_called_over_and_over_is_several_calls_of_one_unit() -> None:
    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(), nn.Linear(8, 2)

        def forward(self, x: Any) -> Any:
            for _ in range(3):
                x = self.block(x)
            return self.head(x)

    graph = capture(Repeats(), (torch.randn(2, 8),))
    assert [call.name for call in graph.calls] == ["block", "block@2", "block@3", "head"]
    assert {call.target for call in graph.calls[:3]} == {"block"}
    assert [call.block for call in graph.calls] == ["block", "block@2", "block@3", None]


def test_a_module_that_holds_parameters_in_its_own_code_is_not_opened() -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(8))
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return self.inner(x) + self.token

    model = nn.Sequential(Embeds(), nn.Linear(8, 8))
    assert unit_names(model, (torch.randn(2, 8),), "leaf") == ["0", "1"]


def test_a_model_without_multiplications_is_weighed_by_parameters() -> None:
    inner = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(8))
    model = nn.Sequential(nn.LayerNorm(8), inner, nn.LayerNorm(8))
    assert unit_names(model, (torch.randn(2, 8),)) == ["0", "1.0", "1.1", "1.2", "2"]
