"""Which process a worker is, so that others can tell whether it still lives.

    workers/3/process.json     {"pid": 4711, "started": "8812345", "host": "node7", "machine": "<boot> <pid namespace>"}

A number alone would lie: it is used again after the process has ended, means another process on another machine, and
another one again in a container. So the time at which the kernel started the process and where the number counts stand
beside it. Importing this module does not import torch.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from stagewright.files.atomic import save_text

__all__ = ["ProcessMark", "ProcessState"]

# unknown: it runs, or ran, where we can't look.
ProcessState: TypeAlias = Literal["running", "stopped", "gone", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMark:
    """One process, told apart from every other."""

    pid: int
    """Its number."""
    started: str
    """When the kernel started it, in its own unit; empty where the system does not tell."""
    host: str
    """The machine's name, for people."""
    machine: str
    """Where the number counts: this boot of this machine, and the namespace in it."""

    @classmethod
    def own(cls) -> ProcessMark:
        """Of this process."""
        pid = os.getpid()
        return cls(pid=pid, started=_stat(pid)[1], host=socket.gethostname(), machine=_machine())

    def write(self, path: Path) -> None:
        """Write the file at once or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        save_text(json.dumps(asdict(self)) + "\n", path)

    @classmethod
    def read(cls, path: Path) -> ProcessMark | None:
        """The mark in a file; None where there is none."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def state(self) -> ProcessState:
        """What has become of the process."""
        here = _machine()
        if self.machine != here:
            restarted = self.machine.partition(" ")[0] != here.partition(" ")[0] and self.host == socket.gethostname()
            return "gone" if restarted else "unknown"
        state, started = _stat(self.pid)
        if not self.started:  # a system without /proc: the number is all there is
            return "running" if _exists(self.pid) else "gone"
        if started != self.started or state in ("Z", "X"):
            return "gone"
        return "stopped" if state in ("T", "t") else "running"


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _stat(pid: int) -> tuple[str, str]:
    """State and time of start of a process; empty where there is none."""
    try:
        # "1234 (a name) with spaces) T 1 …": the state follows the last bracket, the start is the 22nd word of all.
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return words[0], words[19]
    except (OSError, IndexError):
        return "", ""


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
