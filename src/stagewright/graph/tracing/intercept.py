"""Stand in for the calls of chosen modules, for a while.

``nn.Module.__call__`` asks for ``_compiled_call_impl`` before it looks at hooks and ``forward``; that is the one
private name used here. So a stand-in sees exactly what the caller passed, and the user's own hooks run inside the
original call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["interceptable", "intercepted"]

_SLOT = "_compiled_call_impl"

Call = Callable[..., Any]


def interceptable(module: nn.Module) -> bool:
    """Whether calls of this module can be stood in for (scripted modules run outside Python)."""
    return not isinstance(module, torch.jit.ScriptModule)


@contextmanager
def intercepted(stand_ins: Mapping[nn.Module, Callable[[Call], Call]]) -> Iterator[None]:
    """Replace each module's call by ``make(original)`` until the block ends."""
    before: list[tuple[nn.Module, Any]] = []
    try:
        for module, make in stand_ins.items():
            slot = vars(module).get(_SLOT)
            original = slot if slot is not None else module._call_impl
            before.append((module, slot))
            vars(module)[_SLOT] = make(original)
        yield
    finally:
        for module, slot in before:
            if slot is None:
                vars(module).pop(_SLOT, None)
            else:
                vars(module)[_SLOT] = slot
