"""The process of a worker: its identity, the signals that end it, and its death with its agent.

    workers/3/process.json     {"pid": 4711, "started": "8812345", "host": "node7", "machine": "<boot> <pid namespace>"}

A process id alone is ambiguous: it is reused after the process has ended, and it means another process on another
machine or in a container. So the kernel's start time and the namespace of the id are stored with it. Importing this
module does not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from stagewright.errors import UsageError
from stagewright.files.atomic import save_text
from stagewright.files.json_values import from_json, read_object

# unknown: the process runs, or ran, on another machine or in another container.
ProcessState: TypeAlias = Literal["running", "stopped", "gone", "unknown"]

LAUNCHER_PID = "STAGEWRIGHT_LAUNCHER_PID"
"""Environment variable of the fork server: the process that it ends with."""

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMark:
    """The identity of one process, unique across machines and restarts."""

    pid: int
    started: str
    """Start time in the kernel's unit; empty where the system does not report it."""
    host: str
    machine: str
    """Boot of the machine and pid namespace, in which the process id is valid."""

    @classmethod
    def of_this_process(cls) -> ProcessMark:
        pid = os.getpid()
        return cls(pid=pid, started=_stat(pid)[1], host=socket.gethostname(), machine=_machine())

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        save_text(json.dumps(asdict(self)) + "\n", path)

    @classmethod
    def read(cls, path: Path) -> ProcessMark | None:
        """Read a file; None where it is missing or damaged."""
        try:
            mark = from_json(cls, read_object(path))
        except (OSError, ValueError, UsageError):
            return None
        return mark if 0 < mark.pid < 2**31 else None

    def state(self) -> ProcessState:
        """Return whether the process still runs."""
        here = _machine()
        if self.machine != here:
            restarted = self.machine.partition(" ")[0] != here.partition(" ")[0] and self.host == socket.gethostname()
            return "gone" if restarted else "unknown"
        state, started = _stat(self.pid)
        if not self.started:  # no /proc: only the process id is known
            return "running" if _exists(self.pid) else "gone"
        if started != self.started or state in ("Z", "X"):
            return "gone"
        return "stopped" if state in ("T", "t") else "running"


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    return _stat(pid)[0] not in ("", "Z", "X")


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP, a debugger); False where the system does not report it."""
    return _stat(pid)[0] in ("T", "t")


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends; `parent` is its process id."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # it ended before the line above


def end_with_agent(*, has_agent: bool) -> None:
    """Send stdout and stderr to one stream, and end this process when the agent that started it ends."""
    with contextlib.suppress(OSError):
        if os.path.sameopenfile(1, 2):  # the launcher opens the log file twice, each with its own position
            os.dup2(2, 1)
    if not has_agent:
        return
    # The agent ends its workers. A KeyboardInterrupt would wait until a blocked receive returns.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    launcher = multiprocessing.parent_process()  # the launcher, not the fork server
    if launcher is not None and not launcher.is_alive():
        raise SystemExit(1)  # it ended before the line above


def call_before_sigterm(save: Callable[[], None]) -> None:
    """Call ``save`` in a thread before SIGTERM ends this process: the main thread may block in a collective."""
    if os.name != "posix":
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def ignore(number: int, frame: Any) -> None:
        """The thread reads the signal from the pipe."""

    def wait() -> None:
        while received := os.read(reader, 1):
            if received[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is ignore:  # no handler of the job
                save()
                ctypes.CDLL(None).signal(signal.SIGTERM, None)  # signal.signal works in the main thread only
                os.kill(os.getpid(), signal.SIGTERM)

    # A child that a job forks is ended by SIGTERM at once, as it would be without this handler.
    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    def reset() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, ignore)
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)
    threading.Thread(target=wait, name="stagewright-sigterm", daemon=True).start()


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _stat(pid: int) -> tuple[str, str]:
    """State and start time of a process; empty where it does not exist."""
    try:
        # "1234 (a name) with spaces) T 1 …": the state follows the last bracket, the start time is the 22nd word.
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
        pass
    return True
