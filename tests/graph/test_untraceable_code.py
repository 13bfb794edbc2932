"""Side effects that a graph would lose: kept whole in a unit, checked at run time, or rejected with a reason."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stagewright.errors import CaptureError, UsageError
from stagewright.graph import capture


class Double(torch.autograd.Function):
    """Passes values on and doubles gradients."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class Lossy(nn.Module):
    """Two layers with something between them that a graph can't hold."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.steps = what, 0
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        h = self.a(x)
        if self.what == "function":
            h = Double.apply(h)
        elif self.what == "hook" and h.requires_grad:
            h.register_hook(lambda gradient: gradient * 2)
        elif self.what == "random":
            h = h * random.random()
        elif self.what == "numpy":
            h = h * float(np.random.rand())
        elif self.what == "count":
            self.steps += 1
            h = h * self.steps
        elif self.what == "larger":
            h = h * 2 if x.shape[0] > 6 else h
        elif self.what == "even":
            h = h * 2 if x.shape[0] % 2 == 0 else h
        elif self.what == "harmless":
            h = h.expand(x.shape[0], 4) if x.shape[0] != 1 else h
        elif self.what == "buffer":
            self.mean = 0.9 * self.mean + h.mean(0).detach()
            h = h + self.mean
        return self.b(h)


class Around(nn.Module):
    """The same as a small part of a model."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 32), Lossy(what), nn.Linear(32, 4)

    def forward(self, x: Any) -> Any:
        return self.inner(self.last(self.first(x)))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("function", "autograd function Double"),
        ("hook", "hook on a tensor"),
        ("random", "random numbers"),
        ("numpy", "random numbers"),
    ],
)
def test_what_a_graph_would_lose_is_rejected_or_kept_whole(what: str, message: str, same_as: Any) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Lossy(what), (torch.randn(2, 4),))
    model = Around(what).train()
    graph = capture(model, (torch.randn(2, 4),), units="leaf")
    assert [call.name for call in graph.calls] == ["first", "last", "inner"]
    assert any("inner is kept whole" in note for note in graph.notes)
    if what in ("function", "hook"):
        same_as(model, graph, (torch.randn(3, 4),))


def test_a_counter_is_reported_or_kept_whole(same_as: Any) -> None:
    with pytest.raises(CaptureError, match="changes its attribute 'steps'"):
        capture(Lossy("count"), (torch.randn(2, 4),))
    graph = capture(Around("count"), (torch.randn(2, 4),), units="leaf")
    assert [call.name for call in graph.calls] == ["first", "last", "inner"]


@pytest.mark.parametrize(("what", "good", "bad"), [("larger", [1, 6], 9), ("even", [2, 4], 3)])
def test_a_branch_on_the_batch_size_is_checked(what: str, good: list[int], bad: int, same_as: Any) -> None:
    model = Lossy(what)
    graph = capture(model, (torch.randn(2, 4),))
    for size in good:
        same_as(model, graph, (torch.randn(size, 4),))
    with pytest.raises(UsageError, match=f"with {bad} samples the model takes another branch at .*untraceable_code"):
        graph(torch.randn(bad, 4))


def test_a_branch_that_changes_nothing_is_no_obstacle(same_as: Any) -> None:
    model = Lossy("harmless")
    graph = capture(model, (torch.randn(2, 4),))
    for size in (1, 2, 5):
        same_as(model, graph, (torch.randn(size, 4),))


def test_a_buffer_that_is_replaced_lives_in_one_stage(same_as: Any, chain: Any) -> None:
    model = Lossy("buffer").train()
    graph = capture(model, (torch.randn(2, 4),))
    same_as(model, graph, (torch.randn(3, 4),))
    same_as(model, chain(graph, [0]), (torch.randn(3, 4),))
    assert "mean" in graph.stage(0, 0).state_dict()


@pytest.mark.parametrize("what", ["size", "value"])
def test_a_number_that_a_unit_returns_is_carried(what: str, same_as: Any, chain: Any) -> None:
    class Numbers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.linear(x), x.shape[0] if what == "size" else x.mean().item()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Numbers(), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            y, number = self.a(x)
            return self.b(y) * number

    model = Model()
    graph = capture(model, (torch.randn(2, 4),))
    for size in (2, 5):
        same_as(model, graph, (torch.randn(size, 4),))
        same_as(model, chain(graph, [0]), (torch.randn(size, 4),))


def test_modules_with_backward_hooks_are_kept_whole(same_as: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)).train()
    model[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
    graph = capture(model, (torch.randn(2, 4),), units="leaf")
    assert [call.name for call in graph.calls] == ["0", "1", "2"]
    same_as(model, graph, (torch.randn(2, 4),))


@pytest.mark.parametrize("what", ["attribute", "list", "hook"])
def test_values_that_leave_a_unit_by_another_way_are_rejected(what: str) -> None:
    """An auxiliary loss kept on the layer, a list that layers append to, a hook that the model sets."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.aux = torch.zeros(())

        def forward(self, x: Any, kept: Any = None) -> Any:
            h = self.linear(x)
            self.aux = h.pow(2).mean()
            if kept is not None:
                kept.append(self.aux)
            return h

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Layer(), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            kept: list[Any] = []
            if what == "hook":
                handle = self.a.register_forward_hook(lambda module, args, output: kept.append(output.mean()))
            h = self.a(x, kept if what == "list" else None)
            if what == "hook":
                handle.remove()
            return self.b(h), self.a.aux * 1 if what == "attribute" else sum(kept) * 1

    with pytest.raises(CaptureError, match="the graph differs from the model"):
        capture(Model().train(), (torch.randn(2, 4),))


def test_inputs_that_only_happened_to_have_one_size_are_checked() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Any, y: Any) -> Any:
            return self.b(self.a(x)).sum(0) + y.mean(0) * y.shape[0]

    graph = capture(Pairs(), (torch.randn(2, 4), torch.randn(2, 4)))
    with pytest.raises(UsageError, match="the same batch size"):
        graph(torch.randn(3, 4), torch.randn(5, 4))
