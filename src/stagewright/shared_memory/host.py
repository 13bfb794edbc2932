"""Memory of the host that other processes read: files without a name, mapped by each of them.

A buffer has no name in any folder, so that nothing is left when its processes end, however they do. What a CPU has
written is there before the message that says so: a message is a system call, which orders memory.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

_LEAST_BYTES = 1 << 16


def memory_id() -> int:
    """Return a number that processes have in common if they can share memory; 0 if this one can't.

    Emulated hosts, which are network namespaces of one machine, differ.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt", "net", "user")]
    except OSError:
        return 0  # another system than Linux
    if not hasattr(os, "memfd_create"):
        return 0
    text = " ".join((boot, socket.gethostname(), str(os.geteuid()), *spaces))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") | 1


class HostMemory:
    """Memory of the host; events are not needed, since a CPU has finished what it has called."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}

    def allocate(self, num_bytes: int) -> torch.Tensor:
        # Powers of two: tensors of ever new sizes share a few buffers.
        size = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
        descriptor = os.memfd_create("stagewright")
        try:
            buffer = _map(f"/proc/self/fd/{descriptor}", size)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptors[buffer.data_ptr()] = descriptor
        return buffer

    def export(self, buffer: torch.Tensor) -> dict[str, Any]:
        return {"process": os.getpid(), "descriptor": self._descriptors[buffer.data_ptr()], "size": buffer.numel()}

    def open(self, exported: dict[str, Any]) -> torch.Tensor:
        process, descriptor, size = (int(exported[name]) for name in ("process", "descriptor", "size"))
        return _map(f"/proc/{process}/fd/{descriptor}", size)

    def make_event(self) -> tuple[Any, str]:
        return None, ""

    def open_event(self, exported: str) -> Any:
        return None

    def record(self, event: Any) -> None:
        pass

    def wait(self, event: Any) -> None:
        pass

    def beside_compute(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def _map(path: str, size: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
