"""Whether the workers of this machine can build their model side by side, told before any of them begins.

Each builds it whole before it keeps its part. The size of a named model is known unbuilt; that of a factory of one's
own is not, and nothing is said of it.
"""

from __future__ import annotations

import contextlib

from stagewright.errors import UsageError
from stagewright.machine import host_memory
from stagewright.spec.plan import ModelSpec

__all__ = ["check_builds"]


def check_builds(model: ModelSpec, num_workers: int) -> None:
    """Refuse a model of which the host's memory can't hold so many."""
    available = host_memory.available_bytes()  # before anything else: other workers begin to build meanwhile
    from stagewright.zoo.size import built_bytes

    size = None
    with contextlib.suppress(UsageError):  # told where it is loaded
        size = built_bytes(model.name, image_size=model.image_size, num_classes=model.num_classes)
    if size is not None:
        host_memory.check_host_room(model.name, size, num_workers, available)
