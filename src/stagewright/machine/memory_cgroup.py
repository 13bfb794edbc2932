"""Memory limits of the control groups that this process is in: containers, Slurm jobs and systemd services have them.

    /proc/self/cgroup             version 2                              version 1
    0::/a/b                       /sys/fs/cgroup/a/b/memory.max
    4:memory:/a/b                                                        /sys/fs/cgroup/memory/a/b/memory.limit_in_bytes

A group is limited by its parents too. Inside a container the path may be that of the host, of which only the root of
the mounted tree is visible, so every folder from the path to the root is read where it exists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 2**60  # version 1 has a number near 2**63 for "no limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMemory:
    """Memory of one control group."""

    limit_bytes: int
    used_bytes: int
    """Of these, the kernel can free ``cache_bytes``: cached files that were not read lately."""
    cache_bytes: int = 0

    @property
    def available_bytes(self) -> int:
        """Bytes that its processes can still allocate."""
        return max(0, self.limit_bytes - self.used_bytes + self.cache_bytes)


def memory_limits() -> list[GroupMemory]:
    """Return the control groups around this process that have a memory limit."""
    groups = (_read_group(folder) for folder in dict.fromkeys(_folders()))
    return [group for group in groups if group is not None and group.limit_bytes < _UNLIMITED]


def _folders() -> Iterator[Path]:
    """Yield the folders of this process's groups, and the roots of both versions."""
    lines = []
    with contextlib.suppress(OSError):
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", "", ""][:3]
        if controllers in ("", "memory") or "memory" in controllers.split(","):
            roots = (_CGROUP / "memory",) if controllers else (_CGROUP, _CGROUP / "unified")
            parts = [part for part in path.split("/") if part not in ("", ".", "..")]
            for depth in range(len(parts), -1, -1):
                yield from (root.joinpath(*parts[:depth]) for root in roots)
    yield from (_CGROUP, _CGROUP / "memory")


def _read_group(folder: Path) -> GroupMemory | None:
    """Read a group of either version; None if it has no limit."""
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):
            limit, used = (int((folder / name).read_text()) for name in (limit_name, used_name))
            return GroupMemory(
                limit_bytes=limit, used_bytes=used, cache_bytes=_read_count(folder / "memory.stat", cache_name)
            )
    return None


def _read_count(path: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0
