"""Unusual models: captured correctly, or rejected with a helpful error."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.utils.generic import ModelOutput

from stagewright.errors import CaptureError, UsageError
from stagewright.graph import capture


def layers() -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = layers(), reentrant

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = checkpoint(layer, value, use_reentrant=self.reentrant)
        return value


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_is_rejected() -> None:
    with pytest.raises(CaptureError, match="use use_reentrant=False"):
        capture(Checkpointed(reentrant=True), (torch.randn(4, 8, requires_grad=True),))


def test_checkpointing_of_the_other_form_is_captured(same_as: Any) -> None:
    torch.manual_seed(0)
    model, value = Checkpointed(reentrant=False), torch.randn(4, 8)
    same_as(model, capture(model, (value,)), (value,))


def test_lazy_modules_must_have_run_once() -> None:
    model = nn.Sequential(OrderedDict(first=nn.LazyLinear(8), second=nn.Linear(8, 2)))
    with pytest.raises(UsageError, match=r"'first\.weight' of Sequential is not initialized yet; run one batch"):
        capture(model, (torch.randn(4, 8),))
    model(torch.randn(4, 8))
    assert len(capture(model, (torch.randn(4, 8),)).calls) == 2


@dataclass
class Answer(ModelOutput):
    value: torch.Tensor | None = None
    hidden: torch.Tensor | None = None


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, value: torch.Tensor) -> Answer:
        hidden = self.layers[1](self.layers[0](value))
        return Answer(value=self.layers[3](self.layers[2](hidden)), hidden=hidden)


def test_a_dataclass_comes_out_as_one() -> None:
    torch.manual_seed(0)
    model, value = Answering(), torch.randn(4, 8)
    found, expected = capture(model, (value,))(value), model(value)
    assert type(found) is Answer
    assert torch.equal(found.value, expected.value)
    assert torch.equal(found.hidden, expected.hidden)


def test_capture_within_inference_mode() -> None:
    torch.manual_seed(0)
    model, value = nn.Sequential(*layers()).eval(), torch.randn(4, 8)
    with torch.inference_mode():
        graph = capture(model, (value,))
        assert torch.equal(graph(value), model(value))
    assert torch.equal(graph(value), model(value))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.register_buffer("adjacency", torch.eye(8).to_sparse())

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.layers[0](value)
        value = torch.sparse.mm(self.adjacency, value.T).T
        return self.layers[3](self.layers[2](self.layers[1](value)))


def test_an_operator_without_shapes_is_rejected_with_its_line() -> None:
    with pytest.raises(CaptureError, match=r"torch\.sparse\.mm.*; move that code into a submodule"):
        capture(Sparse(), (torch.randn(4, 8),))
