"""Transformers of torch's own layers, which compare a mask's values with a causal mask's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stagewright.graph import capture

VOCABULARY, WIDTH, LENGTH = 40, 16, 12


class LanguageModel(nn.Module):
    """A decoder-only model, as the tutorials of torch build it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, 0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1]) if mask is None else mask
        return self.head(self.encoder(self.embed(ids), mask=mask))


class Translator(nn.Module):
    """Encoder and decoder, without the hint that the decoder's mask is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 24, 0.2, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.transformer(self.embed(source), self.embed(target), tgt_mask=mask))


def ids(batch: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch", [4, LENGTH])
def test_a_causal_mask_made_by_the_model(same_as: Any, batch: int, training: bool) -> None:
    torch.manual_seed(0)
    model = LanguageModel().train(training)
    graph = capture(model, (ids(batch),))
    same_as(model, graph, (ids(batch),))
    same_as(model, graph, (ids(batch - 1),))


@pytest.mark.parametrize("training", [True, False])
def test_encoder_and_decoder(same_as: Any, training: bool) -> None:
    torch.manual_seed(0)
    model = Translator().train(training)
    same_as(model, capture(model, (ids(4, 9), ids(4))), (ids(4, 9), ids(4)))


def test_a_mask_that_is_causal_in_one_batch_only(same_as: Any) -> None:
    torch.manual_seed(0)
    model, causal = LanguageModel(), nn.Transformer.generate_square_subsequent_mask(LENGTH)
    graph = capture(model, (ids(4), causal))
    for mask in (causal, causal.roll(1, 0).clone(), torch.zeros(LENGTH, LENGTH)):
        same_as(model, graph, (ids(4), mask))
