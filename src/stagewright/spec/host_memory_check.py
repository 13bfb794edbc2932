"""Check that the workers of this machine can build their model at the same time, before any of them begins.

Each worker builds the whole model before it keeps its part, unless it trains with weights that are read from files. The
size of a named model is known without building it; a user-defined factory is not checked.
"""

from __future__ import annotations

import contextlib

from stagewright.errors import UsageError
from stagewright.machine import host_memory
from stagewright.spec.plan import ModelSpec, Plan


def num_parts(plan: Plan) -> int:
    """Return how many parts a plan's model is read in: 1 if each worker builds it whole."""
    model = plan.model
    has_files = model.weights != "random" if model.name.startswith("hf:") else model.weights is not None
    if plan.task is None or not has_files:
        return 1
    return plan.mesh.pipeline * (plan.num_shards if plan.shard else 1)


def check_host_memory(model: ModelSpec, num_workers: int, num_parts: int = 1) -> None:
    """Refuse a model that does not fit in host memory ``num_workers`` times, or as often as its parts are read."""
    available = host_memory.available_bytes()  # first: other workers may begin to build meanwhile
    from stagewright.zoo.size import built_bytes

    size = None
    with contextlib.suppress(UsageError):  # raised again where the model is loaded
        size = built_bytes(model.name, image_size=model.image_size, num_classes=model.num_classes)
    if size is not None:
        host_memory.check_model_memory(model.name, size, num_workers, available, num_parts=num_parts)
