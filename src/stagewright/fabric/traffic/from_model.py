"""Traffic of data-parallel training, from a model: the gradients of every layer, last layer first.

    fc1 ─► fc2 ─► fc3 ─► fc4 ─► loss             sizes [2600, 33024, 131584, 803840] of mlp-mnist:
    803840 131584 33024  2600  ◄── backward      in the order in which they are ready

A layer is a module with parameters of its own; shared parameters count where backward reaches them first. With a bucket
size, layers are grouped into buckets in the same order, as in DDP.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from stagewright.errors import UsageError
from stagewright.fabric.traffic.workload import Message, Workload

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from stagewright.zoo import Model


def from_model(
    model: Model, num_ranks: int, *, algorithm: str = "ring", bucket_bytes: int | None = None, trials: int, **more: Any
) -> Workload:
    """Create a workload with one all-reduce per layer or bucket."""
    layers = gradient_sizes(model)
    if not layers:
        raise UsageError(f"{model.name} has no parameter that requires a gradient, so there is nothing to send")
    all_ranks = (tuple(range(num_ranks)),)
    messages = tuple(
        Message(name=name, algorithm=algorithm, num_bytes=size, groups=all_ranks)
        for name, size in buckets(layers, bucket_bytes)
    )
    return Workload(name=model.name, num_ranks=num_ranks, messages=messages, trials=trials, **more)


def gradient_sizes(model: Model) -> list[tuple[str, int]]:
    """Return (layer, gradient bytes) in backward order, determined by one forward pass."""
    order: list[str] = []
    _run_with_hooks(
        model,
        (
            module.register_forward_pre_hook(lambda _module, _inputs, name=name: order.append(name))
            for name, module in model.module.named_modules()
        ),
    )
    called = list(dict.fromkeys(reversed(order)))
    modules = dict(model.module.named_modules())
    counted: set[int] = set()
    sizes = []
    # Modules that are never called may hold parameters too; they come last.
    for name in [*called, *(name for name in reversed(modules) if name not in set(called))]:
        size = 0
        for parameter in modules[name].parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in counted:
                counted.add(id(parameter))
                size += parameter.numel() * parameter.element_size()
        if size:
            sizes.append((name or "model", size))
    return sizes


def activation_sizes(model: Model, batch: int) -> list[tuple[str, int]]:
    """Return (layer, bytes of its output for a batch) in forward order, of layers with parameters of their own."""
    import torch

    sizes: dict[str, int] = {}

    def count(name: str, output: object) -> None:
        if isinstance(output, torch.Tensor) and name not in sizes:
            sizes[name] = output.numel() * output.element_size() * batch // model.batch_size

    _run_with_hooks(
        model,
        (
            module.register_forward_hook(lambda _module, _inputs, output, name=name: count(name or "model", output))
            for name, module in model.module.named_modules()
            if any(True for _ in module.parameters(recurse=False))
        ),
    )
    return list(sizes.items())


def _run_with_hooks(model: Model, hooks: Iterable[RemovableHandle]) -> None:
    """Run one forward pass on the example batch while the hooks exist."""
    import torch

    with ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.remove)
        with torch.no_grad():
            model.module(*model.args, **model.kwargs)


def buckets(layers: Sequence[tuple[str, int]], bucket_bytes: int | None) -> list[tuple[str, int]]:
    """Group adjacent layers into buckets; without a bucket size, one bucket per layer."""
    if bucket_bytes is None:
        return list(layers)
    if bucket_bytes < 1:
        raise UsageError(f"the bucket size is {bucket_bytes} bytes; use at least 1")
    filled: list[tuple[str, int]] = []
    first, last, size, num = "", "", 0, 0
    for name, layer_bytes in layers:
        first, last, size, num = first or name, name, size + layer_bytes, num + 1
        if size >= bucket_bytes:
            filled.append((first if num == 1 else f"{first} … {last}", size))
            first, size, num = "", 0, 0
    if size:
        filled.append((first if num == 1 else f"{first} … {last}", size))
    return filled


def num_trials(num_samples: int, batch: int, epochs: int) -> int:
    """Return the training steps: batches × epochs; the last batch of an epoch may be smaller."""
    for name, value in (("samples", num_samples), ("batch", batch), ("epochs", epochs)):
        if value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}")
    return math.ceil(num_samples / batch) * epochs
