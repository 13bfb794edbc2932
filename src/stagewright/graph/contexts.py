"""Grad mode and autocast around pieces of glue.

A model may run part of its own code under ``torch.no_grad()`` or ``torch.autocast(...)``. Export wraps such a piece
into a sub-graph; capture flattens it and marks its nodes with the contexts they ran in. ``enter`` and ``leave`` are
what a generated forward calls around them, ``all_left`` closes what an exception left open.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Autocast", "GradMode", "all_left", "enter", "leave"]


@dataclass(frozen=True, slots=True)
class GradMode:
    """``torch.set_grad_enabled(enabled)``; enabling never overrides an outer ``no_grad``."""

    enabled: bool

    def open(self) -> AbstractContextManager[Any]:
        """The context manager itself."""
        return torch.set_grad_enabled(self.enabled and torch.is_grad_enabled())


@dataclass(frozen=True, slots=True)
class Autocast:
    """``torch.autocast(device, dtype, enabled, cache_enabled)``."""

    device: str
    dtype: torch.dtype | None
    enabled: bool
    cache: bool | None

    def open(self) -> AbstractContextManager[Any]:
        """The context manager itself."""
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache)


_opened = threading.local()


def enter(context: GradMode | Autocast) -> None:
    """Open a context inside a generated forward."""
    manager = context.open()
    manager.__enter__()
    _stack().append(manager)


def leave() -> None:
    """Close the context opened last."""
    _stack().pop().__exit__(None, None, None)


@contextmanager
def all_left() -> Iterator[None]:
    """Close, also after an exception, every context opened inside the block."""
    depth = len(_stack())
    try:
        yield
    finally:
        while len(_stack()) > depth:
            leave()


def _stack() -> list[AbstractContextManager[Any]]:
    if not hasattr(_opened, "stack"):
        _opened.stack = []
    stack: list[AbstractContextManager[Any]] = _opened.stack
    return stack
