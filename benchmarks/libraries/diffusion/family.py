"""A model of diffusers, tiny and with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from families.family import Arguments, Family

Shapes = dict[str, Any]
"""For each keyword argument: the shape of one sample, the number of classes of an index, or a constant."""
_INDICES = ("timestep", "class_labels", "style")


def _example(shapes: Shapes) -> Callable[[int], Arguments]:
    def example(batch_size: int) -> Arguments:
        generator = torch.Generator().manual_seed(300 + batch_size)
        kwargs: dict[str, Any] = {}
        for name, shape in shapes.items():
            if "mask" in name and shape is not None:
                kwargs[name] = torch.ones(batch_size, *shape, dtype=torch.int64)
            elif name in _INDICES and isinstance(shape, int):
                kwargs[name] = torch.randint(0, shape, (batch_size,), generator=generator)
            elif name == "input_ids":
                kwargs[name] = torch.randint(0, shape, (batch_size, 4, 4), generator=generator)
            elif isinstance(shape, tuple):
                kwargs[name] = torch.randn(batch_size, *shape, generator=generator)
            elif isinstance(shape, dict):
                kwargs[name] = _example(shape)(batch_size)[1]
            else:
                kwargs[name] = shape
        return (), kwargs

    return example


def make_family(name: str, class_name: str, shapes: Shapes, **config: Any) -> Family:
    def make() -> nn.Module:
        import diffusers

        model: nn.Module = getattr(diffusers, class_name)(**config)
        return model

    return Family(name=name, group="diffusers", model_class=class_name, make=make, example=_example(shapes))


TIMESTEPS = 1000
TEXT = (6, 16)
"""Tokens and width of a text's hidden states."""
IMAGE = (4, 16, 16)
"""Channels, height and width of a latent image."""
