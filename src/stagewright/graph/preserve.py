"""Preserve the state of a user's module.

Capturing and measuring run the model, which updates batch norm statistics, fills caches in attributes and draws random
numbers. ``preserved`` restores all of that. Parameters are not copied: a forward that writes to its own parameters is
not undone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# Attributes that may grow in a forward: caches, hooks, the registries of submodules and buffers.
_CONTAINERS = (list, dict, set)


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore buffers, attributes and random state of ``model`` when the block ends."""
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    containers = [
        (value, copy.copy(value)) for saved in attributes for value in saved.values() if isinstance(value, _CONTAINERS)
    ]
    buffers = {id(b): (b, b.detach().clone()) for module in modules for b in module._buffers.values() if b is not None}
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            for module, saved in zip(modules, attributes, strict=True):
                current = vars(module)
                for name in [name for name in current if name not in saved]:
                    del current[name]
                current.update(saved)
            for container, content in containers:
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)
            with torch.no_grad():
                for buffer, value in buffers.values():
                    if buffer.layout is torch.strided and not torch.equal(buffer, value):
                        buffer.copy_(value)
