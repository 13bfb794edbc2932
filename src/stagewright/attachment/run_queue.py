"""How long a thread was ready to run while no core was free, from Linux.

    /proc/thread-self/schedstat      174335  69259  1      ns on a core, ns in the run queue, time slices

A thread that waits for a message, for storage or for a lock is in no run queue.
"""

from __future__ import annotations

import os


class RunQueue:
    """Reads the time that the thread which created it has spent in the run queue; costs about a microsecond."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = None  # not Linux, or a kernel without scheduler statistics

    def waited_s(self) -> float | None:
        """Return the time since the thread started; None where the kernel does not say."""
        if self._file is None:
            return None
        try:
            return int(os.pread(self._file, 96, 0).split()[1]) * 1e-9
        except (OSError, ValueError, IndexError):
            return None

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
