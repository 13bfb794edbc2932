"""Check that the workers of this machine can build their model at the same time, before any of them begins.

Each worker builds the whole model before it keeps its part, unless it trains with weights that are read from files, or
compares with a streamed baseline, which is chosen here for a model that is too large. The size of a named model is
known without building it; a user-defined factory is not checked.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from stagewright.errors import UsageError
from stagewright.machine import host_memory
from stagewright.spec.plan import ModelSpec, Plan

BUILT_COPIES = {True: 3, False: 1}
"""Copies of a model that a worker holds while it captures it, by whether it trains: weights, and gradients twice."""


def num_parts(plan: Plan) -> int:
    """Return how many parts a plan's model is read in: 1 if each worker builds it whole."""
    if not _has_files(plan.model) or (plan.task is None and plan.baseline != "streamed"):
        return 1
    return plan.mesh.pipeline * (plan.num_shards if plan.shard else 1)


def choose_baseline(plan: Plan) -> Plan:
    """Stream the baseline of a plan that leaves it open if its model fits neither its devices nor this host whole."""
    if plan.baseline != "auto" or plan.task is not None or _why_not_streamed(plan) is not None:
        return plan
    size = _built_bytes(plan.model)
    if size is None:
        return plan
    available = host_memory.available_bytes()
    needed = BUILT_COPIES[plan.training] * plan.mesh.num_workers * size
    fits_host = available is None or needed <= available
    fits_device = plan.memory_bytes is None or size <= plan.memory_bytes
    return plan if fits_host and fits_device else replace(plan, baseline="streamed")


def check_baseline(plan: Plan) -> None:
    """Refuse a streamed baseline for a plan that can't have one."""
    reason = _why_not_streamed(plan) if plan.baseline == "streamed" else None
    if reason is not None:
        raise UsageError(f'baseline = "streamed", but {reason}; use baseline = "whole"')


def _why_not_streamed(plan: Plan) -> str | None:
    if not _has_files(plan.model):
        return f"the weights of {plan.model.name} are not read from files (hf:FOLDER, or weights = FOLDER)"
    if plan.has_codecs:
        return f"codec = {plan.codec!r} compresses what crosses the cuts"
    if plan.batch_norm == "deferred":
        return 'batch_norm = "deferred" needs all micro-batches of the whole model'
    return None


def _has_files(model: ModelSpec) -> bool:
    return model.weights != "random" if model.name.startswith("hf:") else model.weights is not None


def check_host_memory(model: ModelSpec, num_workers: int, num_parts: int = 1) -> None:
    """Refuse a model that does not fit in host memory ``num_workers`` times, or as often as its parts are read."""
    available = host_memory.available_bytes()  # first: other workers may begin to build meanwhile
    size = _built_bytes(model)
    if size is not None:
        host_memory.check_model_memory(model.name, size, num_workers, available, num_parts=num_parts)


def _built_bytes(model: ModelSpec) -> int | None:
    """Return the bytes of a model in float32; None if they are unknown."""
    from stagewright.zoo.size import built_bytes

    with contextlib.suppress(UsageError):  # raised again where the model is loaded
        return built_bytes(model.name, image_size=model.image_size, num_classes=model.num_classes)
    return None
