"""Units that take and return objects of any class, and numbers that differ from call to call."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.utils import ModelOutput

from stagewright.errors import CaptureError
from stagewright.graph import capture


@dataclass
class Plain:
    value: Any
    scale: Any = 2.0


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Any
    scale: Any = 2.0


class Pair(NamedTuple):
    value: Any
    scale: Any = 2.0


@dataclass
class Output(ModelOutput):
    value: Any = None
    scale: Any = None


class Slots:
    __slots__ = ("__hidden", "scale", "value")

    def __init__(self, value: Any, scale: Any = 2.0) -> None:
        self.value, self.scale, self.__hidden = value, scale, None


class FrozenDict(OrderedDict):  # type: ignore[type-arg]
    """A dictionary that refuses changes after its creation, like those of diffusers."""

    def __init__(self, value: Any, scale: Any = 2.0) -> None:
        super().__init__(value=value, scale=scale)
        self.frozen = True

    value = property(lambda self: self["value"])
    scale = property(lambda self: self["scale"])

    def __setitem__(self, key: Any, value: Any) -> None:
        if hasattr(self, "frozen"):
            raise TypeError("can't change a FrozenDict")
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("can't change a FrozenDict")

    def clear(self) -> None:
        raise TypeError("can't change a FrozenDict")


class FrozenList(list):  # type: ignore[type-arg]
    def __init__(self, value: Any, scale: Any = 2.0) -> None:
        super().__init__([value, scale])

    value = property(lambda self: self[0])
    scale = property(lambda self: self[1])

    def append(self, item: Any) -> None:
        raise TypeError("can't change a FrozenList")

    extend = append


class Nested:
    def __init__(self, value: Any, scale: Any = 2.0) -> None:
        self.parts = {"inner": [Frozen(value), Plain(None, scale)]}

    value = property(lambda self: self.parts["inner"][0].value)
    scale = property(lambda self: self.parts["inner"][1].scale)


CLASSES: list[Any] = [Plain, Frozen, Pair, Output, Slots, FrozenDict, FrozenList, Nested]
try:
    import attrs
except ImportError:
    pass
else:

    @attrs.frozen
    class Attrs:
        value: Any
        scale: Any = 2.0

    CLASSES.append(Attrs)


class Layer(nn.Module):
    """Takes and returns an object; its scale is a number that the values determine."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(4, 4), made

    def forward(self, state: Any) -> Any:
        value = torch.tanh(self.linear(state.value)) * state.scale
        return self.made(value, float(value.detach().abs().max()))


class Model(nn.Module):
    def __init__(self, made: Any) -> None:
        super().__init__()
        self.config = FrozenDict(1)
        self.layers = nn.ModuleList(Layer(made) for _ in range(3))

    def forward(self, state: Any) -> Any:
        for layer in self.layers:
            state = layer(state)
        return state


@pytest.mark.parametrize("made", CLASSES, ids=lambda made: made.__name__)
def test_objects_cross_cuts(made: Any, same_as: Any, chain: Any) -> None:
    torch.manual_seed(0)
    model = Model(made)
    graph = capture(model, (made(torch.randn(2, 4), 2.0),))
    assert len(graph.calls) == 3
    assert [value.dtype for value in graph.cuts[0].crossing] == ["float32", "float64"]  # the value and its scale
    for size in (2, 3):
        same_as(model, graph, (made(torch.randn(size, 4), 2.0),))
        same_as(model, chain(graph, [0, 1]), (made(torch.randn(size, 4), 2.0),))
    assert type(graph(made(torch.randn(2, 4), 2.0))) is made


@pytest.mark.parametrize("kind", ["set", "filled", "text"])
def test_what_cannot_be_carried_is_named(kind: str) -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any, memory: Any = None) -> Any:
            y = self.linear(x)
            if kind == "set":
                return Plain(y, {y * 2})
            if kind == "text":
                return Plain(y, f"{len(x)} samples")
            memory.scale = y
            return Plain(y, 1)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = First(), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x, memory=Plain(0)).value)

    message = {
        "set": "unit 'first' returns a set in '.scale' with a tensor in '[0]'",
        "text": "unit 'first' returns a value in '.scale' that was '2 samples' and then '3 samples'",
        "filled": "unit 'first' changes its argument 'memory', a Plain",
    }[kind]
    with pytest.raises(CaptureError) as caught:
        capture(Whole(), (torch.randn(2, 4),))
    assert message in str(caught.value)
