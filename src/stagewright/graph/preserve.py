"""Leave a user's module as it was.

Capturing and measuring run the model for real, which moves batch norm's statistics, fills caches kept as attributes
and draws random numbers. ``preserved`` puts all of that back. Parameters are not copied: a forward that writes to its
own parameters is not undone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["preserved"]

_PLAIN = (
    list,
    dict,
    set,
)  # attributes that may grow in a forward: caches, hooks, the registries of submodules and buffers


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore buffers, attributes and random state of ``model`` when the block ends."""
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    containers = [
        (held, copy.copy(held)) for saved in attributes for held in saved.values() if isinstance(held, _PLAIN)
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
            for held, before in containers:
                held.clear()
                held.extend(before) if isinstance(held, list) else held.update(before)
            with torch.no_grad():
                for tensor, content in buffers.values():
                    if tensor.layout is torch.strided and not torch.equal(tensor, content):
                        tensor.copy_(content)
