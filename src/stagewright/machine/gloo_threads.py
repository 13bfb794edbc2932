"""SCHED_BATCH for Gloo's threads, which share the core of a pinned worker.

A pinned worker has one core for compute and for Gloo's threads. Gloo's socket thread busy-waits for a connection that
another thread holds: if it wakes up while that thread sends, it preempts it and spins until the kernel's next tick, 4
ms later. A small all-reduce then takes 4 ms instead of 0.4.

    SCHED_BATCH    a thread that wakes up does not preempt another; it still gets its share of the core

This needs no privilege, and threads inherit it from the thread that starts them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def sched_batch_threads() -> Iterator[None]:
    """Start threads in here, such as those of a process group, with SCHED_BATCH; this thread keeps its policy.

    Does nothing where the system has no SCHED_BATCH or this thread has another policy already.
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
