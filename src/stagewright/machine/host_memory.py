"""The memory of this machine: how much is left, and whether models have room that each worker builds for itself.

A worker builds its model whole, in the host's memory, before it keeps its part of it: n workers of a machine hold it n
times at that moment, also where a model is too large for the devices that they will use.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from stagewright.errors import UsageError
from stagewright.quantity import format_bytes

__all__ = ["available_bytes", "check_host_room", "kills_for_memory"]

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """What processes can still be given without others' being ended: of the machine, or of this container."""
    found = []
    lines = _numbers(_PROC / "meminfo")
    if "MemAvailable:" in lines:
        found.append((lines["MemAvailable:"] + lines.get("SwapFree:", 0)) * 1024)
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        found.append(limit - used + _numbers(_CGROUP / "memory.stat").get("inactive_file", 0))
    return max(0, min(found)) if found else None


def check_host_room(model: str, model_bytes: int, num_workers: int, available: int | None) -> None:
    """Refuse a model that so many workers of this machine can't build at once in the memory that was available."""
    needed = num_workers * model_bytes
    if available is None or needed <= available:
        return
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


def kills_for_memory() -> int:
    """How many processes the system has ended because no memory was left, since it began; 0 where it does not tell."""
    return _numbers(_PROC / "vmstat").get("oom_kill", 0)


def _numbers(path: Path) -> dict[str, int]:
    """The second word of each line, by the first."""
    found = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError, IndexError):
                name, number, *_ = line.split()
                found[name] = int(number)
    return found
