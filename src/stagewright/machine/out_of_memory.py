"""Memory that a device, or the host, has not: torch's error as one sentence, whoever asked for it.

    worker 0 is out of memory during serial reference: 2.00 GiB more wanted on cuda:0, of whose 79.2 GiB this process
    holds 70.1 GiB and others 8.00 GiB; use …

What a worker's own steps need is told better by its tracker (``engine.memory``), which knows what filled the memory.
This is for everything else: loading, capturing, measuring, the serial reference.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

from stagewright.errors import RunError
from stagewright.machine.host_memory import available_bytes
from stagewright.quantity import format_bytes, parse_bytes

__all__ = ["refusal_of", "refusals", "wanted_of"]

_FIX = "use a smaller batch, more micro-batches or shorter samples, or a device with more memory"
_ON_HOST = "DefaultCPUAllocator: "  # what follows depends on the system


@contextlib.contextmanager
def refusals(who: str, doing: Callable[[], str], limit_bytes: int | None = None) -> Iterator[None]:
    """Tell of an allocation that is refused inside: who asked, doing what, how much there is."""
    try:
        yield
    except Exception as error:
        told = refusal_of(error, who=who, doing=doing(), limit_bytes=limit_bytes)
        if told is None:
            raise
        raise told from error


def refusal_of(error: BaseException, *, who: str, doing: str, limit_bytes: int | None = None) -> RunError | None:
    """What to tell of an error that says that there is no more memory; None of any other."""
    import torch

    on_device = isinstance(error, torch.OutOfMemoryError)
    if not on_device and not isinstance(error, MemoryError) and _ON_HOST not in str(error):
        return None
    return RunError(f"{who} is out of memory during {doing}: {wanted_of(error, limit_bytes)}; {_FIX}")


def wanted_of(error: BaseException, limit_bytes: int | None = None) -> str:
    """How much was wanted of what there is, by such an error."""
    import torch

    text = str(error)
    where = _of_device(text) if isinstance(error, torch.OutOfMemoryError) else _of_host()
    allowed = "" if limit_bytes is None else f" ({format_bytes(limit_bytes)} allowed)"
    return f"{_wanted(text)} wanted on {where}{allowed}"


def _wanted(text: str) -> str:
    """How much was asked for, in torch's own words."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) ?([KMGT]?i?B|bytes)", text)
    if found is None:
        return "more"
    return f"{format_bytes(parse_bytes(found[1] + found[2].removesuffix('ytes').upper().replace('I', 'i')))} more"


def _of_device(text: str) -> str:
    """A GPU, and who holds what of it, as far as that can be asked for."""
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
