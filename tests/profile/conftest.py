"""A unit graph in miniature: the modules of an `nn.Sequential`, called one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from stagewright.capture.value import Crossing, Cut, UnitCall


@dataclass
class Recorded:
    call: UnitCall
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Chain:
    """Has what the profile needs of a unit graph."""

    def __init__(self, model: nn.Sequential, example: torch.Tensor) -> None:
        self.model = model
        self.batch_size = example.shape[0]
        self._modules = list(model)
        self.calls = tuple(
            UnitCall(index=index, name=str(index), target=str(index), kind=type(part).__name__, block=None)
            for index, part in enumerate(model)
        )
        cuts = []
        value = example
        training = model.training
        model.eval()
        for index, part in enumerate(self._modules[:-1]):
            with torch.no_grad():
                value = part(value)
            crossing = Crossing(
                name="hidden", shape=tuple(value.shape), dtype="float32", item_bytes=4, batch_dim=0
            )
            cuts.append(Cut(index=index, after=str(index), before=str(index + 1), crossing=(crossing,)))
        model.train(training)
        self.cuts = tuple(cuts)

    def __call__(self, value: Any) -> Any:
        for part in self._modules:
            value = part(value)
        return value

    def module(self, call: UnitCall) -> nn.Module:
        return self._modules[call.index]

    def parameters_of(self, call: UnitCall) -> dict[str, nn.Parameter]:
        return dict(self.module(call).named_parameters())

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Recorded]:
        (value,) = args
        for call, part in zip(self.calls, self._modules, strict=True):
            yield Recorded(call, part, (value,), kwargs)
            value = part(value)


@pytest.fixture
def chain() -> Callable[..., Any]:
    return lambda *parts, example: Chain(nn.Sequential(*parts), example)
