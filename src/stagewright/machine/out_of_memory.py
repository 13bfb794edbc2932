"""Out-of-memory errors of a device or the host, explained in one sentence.

    worker 0 is out of memory during serial reference: 2.00 GiB more wanted on cuda:0, of whose 79.2 GiB this process
    holds 70.1 GiB and others 8.00 GiB; use …

During a worker's steps its tracker (``engine/worker/memory.py``) says more, because it knows the memory by category.
This is for everything else: loading, capturing, profiling, the single-device baseline.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

from stagewright.errors import RunError
from stagewright.machine.host_memory import available_bytes
from stagewright.quantity import format_bytes, parse_bytes

_FIX = (
    "use a smaller batch, more micro-batches, activation checkpointing (--recompute always) or shorter samples, or a "
    "device with more memory"
)
_ON_HOST = "DefaultCPUAllocator: "  # what follows depends on the system


@contextlib.contextmanager
def explain_oom(who: str, doing: Callable[[], str], limit_bytes: int | None = None) -> Iterator[None]:
    """Turn an out-of-memory error inside into one that says who, doing what, and how much memory there is."""
    try:
        yield
    except Exception as error:
        explained = oom_error(error, who=who, doing=doing(), limit_bytes=limit_bytes)
        if explained is None:
            raise
        raise explained from error


def oom_error(error: BaseException, *, who: str, doing: str, limit_bytes: int | None = None) -> RunError | None:
    """Return the explained error for an out-of-memory error; None for any other."""
    import torch

    on_device = isinstance(error, torch.OutOfMemoryError)
    if not on_device and not isinstance(error, MemoryError) and _ON_HOST not in str(error):
        return None
    return RunError(f"{who} is out of memory during {doing}: {describe_request(error, limit_bytes)}; {_FIX}")


def describe_request(error: BaseException, limit_bytes: int | None = None) -> str:
    """Describe how much was requested, and of what."""
    import torch

    text = str(error)
    where = _of_device(text) if isinstance(error, torch.OutOfMemoryError) else _of_host()
    allowed = "" if limit_bytes is None else f" ({format_bytes(limit_bytes)} allowed)"
    return f"{_wanted(text)} wanted on {where}{allowed}"


def _wanted(text: str) -> str:
    """Read the requested size from torch's message."""
    match = re.search(r"[Tt]ried to allocate ([\d.]+) ?([KMGT]?i?B|bytes)", text)
    if match is None:
        return "more"
    return f"{format_bytes(parse_bytes(match[1] + match[2].removesuffix('ytes').upper().replace('I', 'i')))} more"


def _of_device(text: str) -> str:
    """Describe a GPU and who holds how much of its memory."""
    import torch

    number = re.search(r"GPU (\d+)", text)
    if number is None and not torch.cuda.is_available():
        return "the device"
    index = int(number[1]) if number else torch.cuda.current_device()
    try:
        free, total = torch.cuda.mem_get_info(index)
        held, reserved = torch.cuda.memory_allocated(index), torch.cuda.memory_reserved(index)
    except (RuntimeError, AssertionError):  # no such GPU, or a torch without any
        return f"cuda:{index}"
    others = total - free - reserved
    beside = f" and others {format_bytes(others)}" if others > 0.02 * total else ""
    return f"cuda:{index}, of whose {format_bytes(total)} this process holds {format_bytes(held)}{beside}"


def _of_host() -> str:
    left = available_bytes()
    return "the host" + ("" if left is None else f", where {format_bytes(left)} are available")
