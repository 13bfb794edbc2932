"""Buffers that another process reads, ordered by events: on a GPU without a wait of the host.

    writer   slot ◄─ copy, record "written" ── notifies the reader ─►   wait for "written", read, record "read"   reader
             reused after "read", in stream order

A slot's memory and its "written" event belong to the writer, its "read" events to its readers. Handles are JSON: what a
process receives is never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class SharedMemory(Protocol):
    """How a kind of device shares memory and orders reads and writes of it."""

    device: torch.device

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return bytes that can be exported."""
        ...

    def export(self, buffer: torch.Tensor) -> dict[str, Any]:
        """Return what another process needs to open a buffer."""
        ...

    def open(self, exported: dict[str, Any]) -> torch.Tensor:
        """Return the bytes of another process's buffer."""
        ...

    def make_event(self) -> tuple[Any, str]:
        """Return an event and what another process needs to open it."""
        ...

    def open_event(self, exported: str) -> Any:
        """Return another process's event."""
        ...

    def record(self, event: Any) -> None:
        """Record an event after the work of the current stream."""
        ...

    def wait(self, event: Any) -> None:
        """Make the current stream wait for an event that has been recorded."""
        ...

    def beside_compute(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Return a context whose work, on these tensors, may run at the same time as what the caller computes next."""
        ...

    def close(self) -> None:
        """Give up what other processes need to open buffers."""
        ...


@dataclass(slots=True)
class WrittenSlot:
    """A buffer of this process, for its writer."""

    number: int
    buffer: torch.Tensor
    written: Any
    described: dict[str, Any]
    """What a reader needs to open it."""
    known_to: set[int] = field(default_factory=set)
    """Readers that have opened it."""
    unread: set[int] = field(default_factory=set)
    """Readers that have not said yet that they read it."""
    last_readers: Sequence[int] = ()
    """The readers of what was written last."""
    read: dict[int, Any] = field(default_factory=dict)
    """The event of each reader."""


@dataclass(slots=True)
class ReadSlot:
    """A buffer of another process, for one of its readers."""

    buffer: torch.Tensor
    written: Any
    read: Any


def view_bytes(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the start of a buffer with the shape and dtype of a tensor."""
    return buffer[: like.nbytes].view(like.dtype).view(like.shape)
