"""The process of which workers are copies: it imports what they need, once.

    begin_importing()      at the begin of a verb that will start workers: it imports while this process does
    imported_ahead()       around the start of workers

Importing torch and transformers takes seconds; a copy of a process that has done it takes a fifth of a second. This
module does not import torch itself.

A process that has begun to use a GPU can't be copied, and asking CUDA whether there is one is a beginning. So whoever
asks while that process imports is answered by the driver's own library (NVML).
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from multiprocessing import forkserver

__all__ = ["begin_importing", "end_importing", "imported_ahead"]

_IMPORTED_AHEAD = (
    "stagewright.engine.jobs.measure",
    "stagewright.engine.jobs.train",
    "stagewright.zoo.loading",
    "torch._dynamo",
    "torch.export._trace",
    "transformers.modeling_utils",
)


def begin_importing() -> None:
    """Start that process; it ends with this one, also while it imports."""
    atexit.register(end_importing)
    _serve()


def end_importing() -> None:
    """End it at once, even in the middle of its imports; its copies end with it."""
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if server is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


@contextlib.contextmanager
def imported_ahead() -> Iterator[None]:
    """Let the process of which workers are copies import what they need, and nothing of the program that asks for them.

    multiprocessing runs that program's main module again in each worker, and a script without a guard would start
    itself for ever.
    """
    _serve()
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _serve() -> None:
    """Ctrl-C is for the launcher alone."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    multiprocessing.set_forkserver_preload([*_IMPORTED_AHEAD])
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main_thread else None
    try:
        forkserver.ensure_running()
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
