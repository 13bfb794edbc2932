"""Intercept the calls of chosen modules temporarily.

``nn.Module.__call__`` checks ``_compiled_call_impl`` before hooks and ``forward``; that is the only private name used
here. So a replacement sees exactly what the caller passed, and the user's hooks run inside the original call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_SLOT = "_compiled_call_impl"

Call = Callable[..., Any]


def can_intercept(module: nn.Module) -> bool:
    """Whether calls of this module can be intercepted (scripted modules run outside Python)."""
    return not isinstance(module, torch.jit.ScriptModule)


@contextmanager
def intercept_calls(replacements: Mapping[nn.Module, Callable[[Call], Call]]) -> Iterator[None]:
    """Replace each module's call with ``make(original)`` until the block ends."""
    originals: list[tuple[nn.Module, Any]] = []
    try:
        for module, make in replacements.items():
            slot = vars(module).get(_SLOT)
            original = slot if slot is not None else module._call_impl
            originals.append((module, slot))
            vars(module)[_SLOT] = make(original)
        yield
    finally:
        for module, slot in originals:
            if slot is None:
                vars(module).pop(_SLOT, None)
            else:
                vars(module)[_SLOT] = slot
