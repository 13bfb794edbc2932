"""Preserve the state of a user's module.

Capturing and measuring run the model, which updates batch norm statistics, fills caches in attributes and draws random
numbers. ``preserved`` restores all of that. Parameters are not copied: a forward that writes to its own parameters is
not undone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# Attributes that may grow in a forward: caches, hooks, the registries of submodules and buffers.
_CONTAINERS = (list, dict, set)
_BUILT_IN = (list, dict, set, OrderedDict)
"""Classes whose truth value says whether they are empty; a subclass may define that differently."""


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore buffers, attributes and random state of ``model`` when the block ends."""
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    values = [value for saved in attributes for value in saved.values() if isinstance(value, _CONTAINERS)]
    containers = [(value, _content(value)) for value in values if type(value) not in _BUILT_IN or value]
    empty = [value for value in values if type(value) in _BUILT_IN and not value]  # most dictionaries of hooks
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
                _restore(container, content)
            for container in empty:
                if container:
                    container.clear()
            with torch.no_grad():
                for buffer, value in buffers.values():
                    if buffer.layout is torch.strided and not torch.equal(buffer, value):
                        buffer.copy_(value)


def _content(container: Any) -> list[Any]:
    """Return the items of a list or set, the keys and values of a dictionary."""
    return list(dict.items(container)) if isinstance(container, dict) else list(container)


def _identities(items: list[tuple[Any, Any]]) -> list[tuple[int, int]]:
    return [(id(key), id(value)) for key, value in items]


def _restore(container: Any, content: list[Any]) -> None:
    """Restore a container that has changed, by the methods of its built-in class: a subclass may refuse changes."""
    if isinstance(container, dict):
        if _identities(_content(container)) == _identities(content):
            return
        base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        base.clear(container)
        for key, value in content:
            base.__setitem__(container, key, value)
    elif isinstance(container, list):
        list.clear(container)
        list.extend(container, content)
    else:
        set.clear(container)
        set.update(container, content)
