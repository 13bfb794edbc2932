"""The traffic of data-parallel training, from a model: the gradient of every layer, last layer first.

    fc1 ─► fc2 ─► fc3 ─► fc4 ─► loss             sizes [2600, 33024, 131584, 803840] of mlp-mnist:
    803840 131584 33024  2600  ◄── backward      what is ready first is sent first

A layer is a module that holds parameters itself; shared ones count where backward meets them first. With a bucket size,
layers are put together as DDP does, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stagewright.errors import UsageError
from stagewright.fabric.traffic.workload import Message, Workload

if TYPE_CHECKING:
    from stagewright.zoo import Model

__all__ = ["buckets", "from_model", "gradient_sizes", "num_trials"]


def from_model(
    model: Model,
    num_ranks: int,
    *,
    algorithm: str = "ring",
    bucket_bytes: int | None = None,
    trials: int,
    **more: Any,
) -> Workload:
    """One all-reduce a layer, or a bucket of layers."""
    layers = gradient_sizes(model)
    if not layers:
        raise UsageError(f"{model.name} has no parameter that needs a gradient, so nothing is sent")
    everyone = (tuple(range(num_ranks)),)
    messages = tuple(
        Message(name=name, algorithm=algorithm, num_bytes=size, groups=everyone)
        for name, size in buckets(layers, bucket_bytes)
    )
    return Workload(name=model.name, num_ranks=num_ranks, messages=messages, trials=trials, **more)


def gradient_sizes(model: Model) -> list[tuple[str, int]]:
    """(layer, bytes of its gradients) in the order of the backward pass, found by one forward pass of the example."""
    import torch

    order: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda _module, _inputs, name=name: order.append(name))
        for name, module in model.module.named_modules()
    ]
    try:
        with torch.no_grad():
            model.module(*model.args, **model.kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    called = list(dict.fromkeys(reversed(order)))
    modules = dict(model.module.named_modules())
    counted: set[int] = set()
    found = []
    # Modules that were never called themselves hold parameters too, sometimes; they come last.
    for name in [*called, *(name for name in reversed(modules) if name not in set(called))]:
        size = 0
        for parameter in modules[name].parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in counted:
                counted.add(id(parameter))
                size += parameter.numel() * parameter.element_size()
        if size:
            found.append((name or "model", size))
    return found


def buckets(layers: Sequence[tuple[str, int]], bucket_bytes: int | None) -> list[tuple[str, int]]:
    """Neighbours put together until a bucket is full; without a bucket size each layer alone."""
    if bucket_bytes is None:
        return list(layers)
    if bucket_bytes < 1:
        raise UsageError(f"a bucket of {bucket_bytes} bytes holds nothing: use at least 1")
    found: list[tuple[str, int]] = []
    first, last, size, num = "", "", 0, 0
    for name, own in layers:
        first, last, size, num = first or name, name, size + own, num + 1
        if size >= bucket_bytes:
            found.append((first if num == 1 else f"{first} … {last}", size))
            first, size, num = "", 0, 0
    if size:
        found.append((first if num == 1 else f"{first} … {last}", size))
    return found


def num_trials(num_samples: int, batch: int, epochs: int) -> int:
    """Steps of a training: batches × epochs, the last one of an epoch may be small."""
    for name, value in (("samples", num_samples), ("batch", batch), ("epochs", epochs)):
        if value < 1:
            raise UsageError(f"{name} = {value}, but must be at least 1")
    return math.ceil(num_samples / batch) * epochs
