"""How much memory a model takes when it is built, known before it is: built without storage, in some hundredths of a
second.

Of a factory of one's own nothing is known before it has run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch

from stagewright.zoo import catalogue, hub
from stagewright.zoo.blueprint import Options
from stagewright.zoo.quiet import quiet_transformers

if TYPE_CHECKING:
    from stagewright.zoo.blueprint import Blueprint

__all__ = ["built_bytes"]


def built_bytes(name: str, *, image_size: int | None = None, num_classes: int | None = None) -> int | None:
    """Bytes of a named model's parameters and buffers as it is built, in float32; None where that can't be told."""
    options = Options(image_size=image_size, num_classes=num_classes)
    head, _, rest = name.partition(":")
    blueprint: Blueprint
    if head == "hf":
        blueprint = hub.blueprint(rest, hub.locate(rest, weights=False), options)
    elif ":" in name and head not in catalogue.names():
        return None
    else:
        entry, layers = catalogue.entry_and_layers(name)
        blueprint = importlib.import_module(f"stagewright.zoo.{entry.builder}").build(entry, options, layers)
    with torch.device("meta"), quiet_transformers():
        module = blueprint.make(blueprint.config)
    return sum(one.numel() * one.element_size() for one in [*module.parameters(), *module.buffers()])
