"""Compiled units share graphs, and compiled stages keep grad mode inside their generated code."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stagewright as sw
from stagewright.graph.compilation import compile_counts, compile_stage, compiled_units


class Block(nn.Module):
    """A block; several of them are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


class Detaching(nn.Module):
    """Blocks with an operation between them that runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            scale = x.abs().mean() + 1
        return x / scale


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> sw.UnitGraph:
    monkeypatch.setenv("STAGEWRIGHT_COMPILE_BACKEND", "eager")
    torch.manual_seed(0)
    return sw.capture(Detaching(), (torch.randn(2, 4),))


def test_like_blocks_are_compiled_once(graph: sw.UnitGraph) -> None:
    x = torch.randn(2, 4, requires_grad=True)  # like the inputs of all blocks
    expected, before = graph(x), compile_counts()
    modules = [graph.module(call) for call in graph.calls]
    with compiled_units(modules):
        assert torch.equal(graph(x), expected)
    assert compile_counts().graphs - before.graphs == 1
    assert compile_counts().graph_breaks == before.graph_breaks
    assert all("forward" not in module.__dict__ for module in modules)


def test_compiled_stage_has_one_graph_and_the_same_gradients(graph: sw.UnitGraph) -> None:
    x, before = torch.randn(2, 4), compile_counts()
    stage = graph.stage(0, len(graph.calls) - 1)
    parameters = list(graph.model.parameters())
    expected = torch.autograd.grad(stage(x)[0].sum(), parameters)
    compile_stage(stage)
    gradients = torch.autograd.grad(stage(x)[0].sum(), parameters)
    assert compile_counts().graphs - before.graphs == 1
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))
