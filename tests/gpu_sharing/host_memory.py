"""Shared memory of the host in the place of a GPU's: the same protocol, for machines without a GPU."""

from __future__ import annotations

import itertools
import os
import tempfile
from typing import Any

import torch

from stagewright.gpu_sharing.process_group import SharedMemoryGroup

_numbers = itertools.count()


class HostMemory:
    """Mapped files, in the folder that TMPDIR names; what a CPU writes is there before the message that says so."""

    device = torch.device("cpu")

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self._path = f"{tempfile.gettempdir()}/shared-{os.getpid()}-{next(_numbers)}"
        return torch.from_file(self._path, shared=True, size=num_bytes, dtype=torch.uint8)

    def export(self, buffer: torch.Tensor) -> dict[str, Any]:
        return {"path": self._path, "size": buffer.numel()}

    def open(self, exported: dict[str, Any]) -> torch.Tensor:
        return torch.from_file(exported["path"], shared=True, size=exported["size"], dtype=torch.uint8)

    def make_event(self) -> tuple[Any, str]:
        return None, ""

    def open_event(self, exported: str) -> Any:
        return None

    def record(self, event: Any) -> None:
        pass

    def wait(self, event: Any) -> None:
        pass


def make_host_group(store: Any, rank: int, size: int, timeout: Any) -> SharedMemoryGroup:
    """Return a group whose tensors of the host go through shared memory."""
    return SharedMemoryGroup(store, rank, size, timeout, HostMemory())
