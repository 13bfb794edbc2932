"""The memory of a model before it is built, from a build on the meta device, which takes a fraction of a second.

The memory of a user's factory is unknown before it runs.
"""

from __future__ import annotations

import torch

from stagewright.zoo.blueprint import Options
from stagewright.zoo.named.catalog import is_factory
from stagewright.zoo.quiet import quiet_transformers
from stagewright.zoo.validation import check_model


def built_bytes(name: str, *, image_size: int | None = None, num_classes: int | None = None) -> int | None:
    """Return the bytes of a model's parameters and buffers in float32; None for a user's factory."""
    if is_factory(name):
        return None
    # The size does not depend on the weights.
    blueprint = check_model(name, "random", Options(image_size=image_size, num_classes=num_classes))
    assert blueprint is not None
    with torch.device("meta"), quiet_transformers():
        module = blueprint.make(blueprint.config)
    return sum(tensor.numel() * tensor.element_size() for tensor in [*module.parameters(), *module.buffers()])
