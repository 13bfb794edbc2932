"""CPU time that other programs take while a study measures.

It is read from /proc at the beginning and the end of each part: the CPU time of every process that is not a descendant
of this one, and what a hypervisor withheld (steal). A process that started and ended in between counts only if its
parent waited for it, so it is a lower bound.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from stagewright.cluster.device import Device
from stagewright.errors import UsageError

BUSY = 0.1
"""Share of the cores' time beyond which times are not those of the study alone."""


def read_other_cpu_s(proc: Path = Path("/proc"), own: int | None = None) -> float | None:
    """Return the CPU seconds that all other programs have used so far; None where /proc does not say."""
    processes = dict(_processes(proc))
    steal = _steal_ticks(proc)
    if not processes or steal is None:
        return None
    own = os.getpid() if own is None else own
    others = sum(ticks for pid, (_, ticks) in processes.items() if not _is_descendant(pid, own, processes))
    return float(others + steal) / os.sysconf("SC_CLK_TCK")


def _processes(proc: Path) -> Iterator[tuple[int, tuple[int, int]]]:
    """Each process with its parent and its CPU ticks, those of children that it waited for included."""
    for path in proc.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
            # The name, in parentheses, may contain spaces.
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            yield int(path.parent.name), (int(fields[1]), sum(map(int, fields[11:15])))


def _steal_ticks(proc: Path) -> int | None:
    try:
        return int((proc / "stat").read_text(encoding="utf-8").split()[8])
    except (OSError, ValueError, IndexError):
        return None


def _is_descendant(pid: int, own: int, processes: Mapping[int, tuple[int, int]]) -> bool:
    while pid in processes and pid != own:
        pid = processes[pid][0]
    return pid == own


def other_load(parts: Iterable[Mapping[str, object]], devices: Iterable[str]) -> float | None:
    """Return the share of the cores' time that other programs took during these parts; None: unknown, or no CPU cores.

    Args:
        parts: Saved parts, with `seconds` and `other_cpu_s`.
        devices: The devices of the study; other programs first use the cores of the machine that it does not use.
    """
    num_cores = _num_cores(devices)
    if num_cores == 0:
        return None
    spare = (os.cpu_count() or num_cores) - num_cores
    used_s = seconds = 0.0
    for part in parts:
        other_s, part_s = part.get("other_cpu_s"), part["seconds"]
        if isinstance(other_s, int | float) and isinstance(part_s, int | float):
            seconds += part_s
            used_s += max(0.0, other_s - spare * part_s)
    return None if seconds < 1.0 else min(1.0, used_s / (num_cores * seconds))


def _num_cores(devices: Iterable[str]) -> int:
    """How many CPU cores the study computes on; without devices, all."""
    devices = tuple(devices)
    if not devices:
        return os.cpu_count() or 1
    cores: set[int] = set()
    for text in devices:
        with contextlib.suppress(UsageError):
            device = Device.parse(text)
            cores |= set(device.cores) if device.kind == "cpu" else set()
    return len(cores)
