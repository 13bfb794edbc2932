"""The hooks that see what autograd saves for backward: the innermost ones, or those around them.

``torch.autograd.graph.saved_tensors_hooks`` nests, and only the innermost hooks are called. The names that read and
change that stack are private to torch and used in this file only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_autograd: Any = torch._C._autograd
Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""What packs a saved tensor, and what unpacks it."""


def innermost_hooks() -> Hooks | None:
    """Return the hooks that the next saved tensor goes through; None if there are none."""
    hooks: Hooks | None = _autograd._top_saved_tensors_default_hooks(True)
    return hooks


def remove_innermost() -> Hooks:
    """Remove the innermost hooks until ``restore`` is called with them."""
    hooks = innermost_hooks()
    assert hooks is not None, "there are hooks to remove"
    _autograd._pop_saved_tensors_default_hooks()
    return hooks


def restore(hooks: Hooks) -> None:
    """Make hooks that were removed the innermost ones again."""
    _autograd._push_saved_tensors_default_hooks(*hooks)


@contextmanager
def without_innermost() -> Iterator[None]:
    """Let the hooks around the innermost ones see what is saved inside the block."""
    hooks = remove_innermost()
    try:
        yield
    finally:
        restore(hooks)
