"""A model family: builds one tiny model and example batches of any size for it.

Weights are random with a fixed seed; parameters that start as a constant (biases, norms, class tokens) get a little
noise, so that one that is skipped or used twice changes the outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Arguments", "Family", "images", "pretrained", "tokens"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one forward call."""

VOCABULARY = 100
TOKENS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of model."""

    name: str
    """Unique short name."""
    group: str
    """Vision, encoder, decoder, …, plain."""
    model_class: str
    make: Callable[[], nn.Module]
    """Builds the model; use ``build``."""
    example: Callable[[int], Arguments]
    """Arguments for a batch of the given size."""
    fails: str | None = None
    """Expected text of the error, for a model that can't be captured; ``None`` for all others."""
    remark: str = ""
    """Remark in the table."""

    def build(self) -> nn.Module:
        """Build the model, always with the same weights."""
        torch.manual_seed(0)
        model = self.make()
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point() and bool((parameter == parameter.flatten()[0]).all()):
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
        return model


def pretrained(
    name: str, group: str, class_name: str, example: Callable[[int], Arguments], *, remark: str = "", **config: Any
) -> Family:
    """Return the family of a transformers model with this configuration."""

    def make() -> nn.Module:
        import transformers

        model_class: Any = getattr(transformers, class_name)
        model: nn.Module = model_class(model_class.config_class(**config))
        return model

    return Family(name=name, group=group, model_class=class_name, make=make, example=example, remark=remark)


def images(size: int = 32, channels: int = 3) -> Callable[[int], Arguments]:
    """Return batches of square images."""

    def example(batch_size: int) -> Arguments:
        generator = torch.Generator().manual_seed(100 + batch_size)
        return (), {"pixel_values": torch.randn(batch_size, channels, size, size, generator=generator)}

    return example


def tokens(
    length: int = TOKENS, *, padded: bool = False, decoder: bool = False, vocabulary: int = VOCABULARY
) -> Callable[[int], Arguments]:
    """Return batches of token ids; ``padded`` adds a padding mask, ``decoder`` a second sequence."""

    def example(batch_size: int) -> Arguments:
        generator = torch.Generator().manual_seed(200 + batch_size)
        kwargs = {"input_ids": torch.randint(3, vocabulary, (batch_size, length), generator=generator)}
        if padded:
            # At least one padded token: models ignore a mask without padding.
            lengths = length - 1 - torch.arange(batch_size) % (length // 2)
            kwargs["attention_mask"] = (torch.arange(length)[None, :] < lengths[:, None]).long()
        if decoder:
            kwargs["decoder_input_ids"] = torch.randint(3, vocabulary, (batch_size, length - 5), generator=generator)
        return (), kwargs

    return example
