"""Transformers built of torch's own layers, with masks, dropout and losses, for tests of context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from parity_jobs import model_with_loss
from torch import nn

from stagewright.zoo.model import Batch, Model

VOCABULARY, WIDTH = 40, 16
_SIZES: dict[str, Any] = {"d_model": WIDTH, "nhead": 4, "dim_feedforward": 24, "dropout": 0.2}


class Tagger(nn.Module):
    """An encoder of torch's layers with a loss over tokens, and padding or a causal mask or both."""

    def __init__(self, *, masks: str, batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(**_SIZES, batch_first=batch_first, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self._masks, self._batch_first = masks, batch_first

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(ids)
        options: dict[str, Any] = {}
        if "padding" in self._masks:
            options["src_key_padding_mask"] = padding_of(ids)
        if "causal" in self._masks:
            options["mask"] = causal_mask(ids.shape[1])
            if "compared" not in self._masks:  # without a hint torch compares the mask's values
                options["is_causal"] = "hint" in self._masks
        hidden = hidden if self._batch_first else hidden.transpose(0, 1)
        hidden = self.encoder(hidden, **options)
        return _scored(self.head(hidden if self._batch_first else hidden.transpose(0, 1)), labels)


class Translator(nn.Module):
    """``nn.Transformer``, whose decoder attends to an encoder of another length."""

    def __init__(self, *, batch_first: bool = True, has_hint: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(**_SIZES, batch_first=batch_first)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.transformer = nn.Transformer(
            **_SIZES, custom_encoder=encoder, num_decoder_layers=2, batch_first=batch_first
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self._batch_first, self._has_hint = batch_first, has_hint

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        source, target = self.embed(ids), self.embed(labels)
        if not self._batch_first:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
        padding = padding_of(ids)
        hidden = self.transformer(
            source,
            target,
            tgt_mask=causal_mask(labels.shape[1]),
            tgt_is_causal=True if self._has_hint else None,
            memory_mask=torch.ones(labels.shape[1], ids.shape[1], dtype=torch.bool).triu(ids.shape[1] - 2),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_key_padding_mask=padding_of(labels),
        )
        return _scored(self.head(hidden if self._batch_first else hidden.transpose(0, 1)), labels)


class Block(nn.Module):
    """A block of a user: attention with weights that are left, over keys of other width, and masks of all kinds."""

    def __init__(self, kind: str, *, batch_first: bool) -> None:
        super().__init__()
        self._kind, self._batch_first = kind, batch_first
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.attention = nn.MultiheadAttention(WIDTH, 4, 0.2, batch_first=batch_first)
        self.narrow, self.cross = (
            nn.Linear(WIDTH, 8),
            nn.MultiheadAttention(WIDTH, 2, bias=False, kdim=8, vdim=8, batch_first=batch_first),
        )

    def forward(self, hidden: torch.Tensor, padding: torch.Tensor, per_head: torch.Tensor) -> Any:
        y = self.norm(hidden)
        length = y.shape[1 if self._batch_first else 0]
        causal = causal_mask(length)
        attended, weights = self.attention(y, y, y, key_padding_mask=padding, attn_mask=causal)
        hidden = hidden + self.dropout(attended)
        narrow = self.narrow(hidden)
        hidden = hidden + self.cross(hidden, narrow, narrow, attn_mask=per_head, need_weights=False)[0]
        return (hidden, weights) if self._kind == "returned weights" else hidden


class Blocks(nn.Module):
    """A model of such blocks."""

    def __init__(self, kind: str = "", *, batch_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(kind, batch_first=batch_first) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self._batch_first = batch_first

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(ids)
        hidden = hidden if self._batch_first else hidden.transpose(0, 1)
        positions = torch.arange(ids.shape[1])
        distances = (positions[:, None] - positions).abs() / ids.shape[1]
        per_head = torch.stack([-distances, distances.cos()]).repeat(ids.shape[0], 1, 1)
        for block in self.blocks:
            hidden = block(hidden, padding_of(ids), per_head)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return _scored(self.head(hidden if self._batch_first else hidden.transpose(0, 1)), labels)


class Bare(nn.Module):
    """Attention that is a unit of its own, with dropout on what it returns."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(VOCABULARY, WIDTH), _attention(batch_first)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(WIDTH, VOCABULARY)
        self._batch_first = batch_first

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(ids)
        hidden = hidden if self._batch_first else hidden.transpose(0, 1)
        hidden = hidden + self.dropout(self.attention(hidden, hidden, hidden, key_padding_mask=padding_of(ids))[0])
        return _scored(self.head(hidden if self._batch_first else hidden.transpose(0, 1)), labels)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tagger": lambda: Tagger(masks="padding"),
    "tagger, causal": lambda: Tagger(masks="causal hint", norm_first=True, activation="gelu"),
    "tagger, causal padding": lambda: Tagger(masks="causal padding", batch_first=False),
    "tagger, compared mask": lambda: Tagger(masks="causal compared"),
    "tagger, length first": lambda: Tagger(masks="", batch_first=False, norm_first=True),
    "translator": Translator,
    "translator, compared mask": lambda: Translator(has_hint=False),
    "translator, length first": lambda: Translator(batch_first=False),
    "blocks": Blocks,
    "blocks, length first": lambda: Blocks(batch_first=False),
    "blocks, returned weights": lambda: Blocks("returned weights"),
    "bare": lambda: Bare(batch_first=True),
    "bare, length first": lambda: Bare(batch_first=False),
}


def make_torch_model(name: str, *, batch: int, length: int, source_length: int) -> Model:
    """Build a tiny transformer of torch's layers; ``source_length``: tokens of a translator's encoder."""
    torch.manual_seed(0)
    module = MODELS[name]()

    def make(count: int) -> Batch:
        labels = torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(count))
        ids = labels.repeat(1, 2)[:, :source_length].flip(1) if name.startswith("translator") else labels
        return Batch(args=(), kwargs={"ids": ids, "labels": labels})

    return model_with_loss(name, module, batch, make)


def padding_of(ids: torch.Tensor) -> torch.Tensor:
    """Hide up to four tokens at the end of each sample."""
    length = ids.shape[1]
    return torch.arange(length) > (ids[:, :1] % 5 + length - 5)


def causal_mask(length: int) -> torch.Tensor:
    """Hide the tokens that follow."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def _scored(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def _attention(batch_first: bool) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(WIDTH, 4, 0.2, batch_first=batch_first)
