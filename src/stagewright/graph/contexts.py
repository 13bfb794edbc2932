"""Grad mode and autocast around glue operations.

A model may run part of its forward under ``torch.no_grad()`` or ``torch.autocast(...)``. Export wraps these operations
into a sub-graph; capture flattens it and marks its nodes with their contexts. A generated forward calls
``enter_context`` and ``exit_context`` around them; ``exit_all_contexts`` closes what an exception left open.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class GradMode:
    """``torch.set_grad_enabled(enabled)``; enabling never overrides an outer ``no_grad``."""

    enabled: bool

    def open(self) -> AbstractContextManager[Any]:
        """Create the context manager."""
        return torch.set_grad_enabled(self.enabled and torch.is_grad_enabled())


@dataclass(frozen=True, slots=True)
class Autocast:
    """``torch.autocast(device, dtype, enabled, cache_enabled)``."""

    device: str
    dtype: torch.dtype | None
    enabled: bool
    cache: bool | None

    def open(self) -> AbstractContextManager[Any]:
        """Create the context manager."""
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache)


_local = threading.local()


def enter_context(context: GradMode | Autocast) -> None:
    """Enter a context inside a generated forward."""
    manager = context.open()
    manager.__enter__()
    _stack().append(manager)


def exit_context() -> None:
    """Exit the context entered last."""
    _stack().pop().__exit__(None, None, None)


@contextmanager
def exit_all_contexts() -> Iterator[None]:
    """Exit every context entered inside the block, also after an exception."""
    depth = len(_stack())
    try:
        yield
    finally:
        while len(_stack()) > depth:
            exit_context()


def _stack() -> list[AbstractContextManager[Any]]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    stack: list[AbstractContextManager[Any]] = _local.stack
    return stack
