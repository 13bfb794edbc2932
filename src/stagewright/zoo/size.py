"""How much memory a model takes when it is built, known before it is: built without storage, in some hundredths of a
second.

Of a factory of one's own nothing is known before it has run.
"""

from __future__ import annotations

import torch

from stagewright.zoo.blueprint import Options
from stagewright.zoo.check import check_model
from stagewright.zoo.named.catalog import is_factory
from stagewright.zoo.quiet import quiet_transformers

__all__ = ["built_bytes"]


def built_bytes(name: str, *, image_size: int | None = None, num_classes: int | None = None) -> int | None:
    """Bytes of a named model's parameters and buffers as it is built, in float32; None where that can't be told."""
    if is_factory(name):
        return None
    # Whatever weights it will have: they change nothing of its size.
    blueprint = check_model(name, "random", Options(image_size=image_size, num_classes=num_classes))
    assert blueprint is not None
    with torch.device("meta"), quiet_transformers():
        module = blueprint.make(blueprint.config)
    return sum(one.numel() * one.element_size() for one in [*module.parameters(), *module.buffers()])
