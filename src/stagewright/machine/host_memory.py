"""Host memory: how much is available, and whether it is enough for the models that workers build.

A worker builds the whole model in host memory before it keeps its part: n workers of a machine hold it n times at that
moment, even where the model is too large for their devices. In training with weights from files it reads only its part.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

from stagewright.errors import UsageError
from stagewright.machine.memory_cgroup import memory_limits
from stagewright.quantity import format_bytes

_PROC = Path("/proc")


def available_bytes() -> int | None:
    """Return the bytes available on the machine and under the limits of this process; None where it is unknown."""
    limits = [group.available_bytes for group in memory_limits()]
    lines = _numbers(_PROC / "meminfo")
    if "MemAvailable:" in lines:
        limits.append((lines["MemAvailable:"] + lines.get("SwapFree:", 0)) * 1024)
    return max(0, min(limits)) if limits else None


def check_model_memory(
    model: str, model_bytes: int, num_workers: int, available: int | None, *, num_parts: int = 1
) -> None:
    """Refuse a model that ``num_workers`` workers can't build at once in the available memory.

    ``num_parts``: how many parts it is read in, if each worker reads its own.
    """
    needed = num_workers * model_bytes // num_parts
    if available is None or needed <= available:
        return
    if num_parts > 1:
        raise UsageError(
            f"each of {num_workers} workers here reads 1/{num_parts} of {model}, {format_bytes(needed)} in total, but "
            f"this machine has {format_bytes(available)} of memory available; use more machines or a smaller model"
        )
    if num_workers == 1:
        raise UsageError(
            f"{model} takes {format_bytes(needed)} to build, but this machine has {format_bytes(available)} of memory "
            "available; use a smaller model, or a machine with more memory"
        )
    fewer = available // model_bytes
    raise UsageError(
        f"each of {num_workers} workers here builds {model} in the host's memory before it keeps its part: "
        f"{num_workers} × {format_bytes(model_bytes)} = {format_bytes(needed)} needed, {format_bytes(available)} "
        f"available; use {'a smaller model' if fewer == 0 else f'at most {fewer} of them here'} or more machines"
    )


def release_freed_memory() -> None:
    """Return freed blocks to the system: capture leaves holes in the C heap, which glibc keeps for later."""
    with contextlib.suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)


def oom_kills() -> int:
    """Return how many processes the OOM killer has ended since boot; 0 where it is unknown."""
    return _numbers(_PROC / "vmstat").get("oom_kill", 0)


def _numbers(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    numbers = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError, IndexError):
                name, number, *_ = line.split()
                numbers[name] = int(number)
    return numbers
