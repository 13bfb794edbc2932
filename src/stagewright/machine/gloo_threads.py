"""Gloo's threads on the core of the worker that they serve.

Gloo has threads of its own beside the one that computes, and a pinned worker has one core for all of them. Its thread
for sockets does not wait for a connection that another thread holds: it asks again and again. Where it wakes up while
that other thread sends, the kernel lets it take the core, and it asks until the kernel's next tick, 4 ms later, gives
the core back. A sum of a few bytes then takes 4 ms instead of 0.4.

    SCHED_BATCH    a thread that wakes up does not take the core from another; it gets its share of it all the same

Nobody needs a privilege for that, and threads have it from the thread that starts them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["patient_threads"]


@contextlib.contextmanager
def patient_threads() -> Iterator[None]:
    """Threads that are started in here, as groups are made, take no core from who computes; this thread does, after it.

    Where the system has no such thing, or this thread's priority is somebody's choice, they are as always.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
