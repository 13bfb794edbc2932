"""The fork server: imports torch and transformers once, so that workers can be forked from it.

    start_fork_server()      at the start of a command that will run workers: it imports in parallel with this process
    wait_for_fork_server()   before the first measurement, which the imports would disturb
    forked_workers()         around the start of workers

Importing torch and transformers takes seconds; forking a process that has imported them takes a fifth of a second. This
module does not import torch itself.

A process that has initialized CUDA can't be forked, and ``torch.cuda.is_available()`` initializes it. So while the
server imports, the driver's library (NVML) answers that question.
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
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver

from stagewright.engine.worker.process import LAUNCHER_PID, is_running

_PRELOADED = (
    "stagewright.engine.launch.end_with_launcher",  # first: the others take seconds
    "stagewright.engine.jobs.measure",
    "stagewright.engine.jobs.train",
    "stagewright.zoo.loading",
    "torch._dynamo",
    "torch.export._trace",
    "stagewright.engine.launch.preload_libraries",
)


def start_fork_server() -> None:
    """Start the server; it ends with this process, even while it imports."""
    atexit.register(stop_fork_server)
    _ensure_running()


def wait_for_fork_server() -> None:
    """Return when the server has finished its imports."""
    with forked_workers():
        process = multiprocessing.get_context("forkserver").Process(target=_end_at_once)
        process.start()
    process.join()
    process.close()


def _end_at_once() -> None:
    """Do nothing, in a process that is forked as soon as the server has finished its imports."""


def stop_fork_server() -> None:
    """End the server at once, even during its imports; forked workers end with it."""
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if server is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


def fork_server_runs() -> bool:
    """Whether the server's process exists."""
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return server is not None and is_running(server)


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """Start workers from the server, without running the main module of this program in them.

    multiprocessing would import the main module in each worker, and a script without an ``if __name__`` guard would
    start itself again.
    """
    _ensure_running()
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _ensure_running() -> None:
    """Start the server so that it ignores Ctrl-C, which the launcher handles."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    multiprocessing.set_forkserver_preload([*_PRELOADED])
    in_main_thread = threading.current_thread() is threading.main_thread()
    # `python -c` puts the current directory first on the path, where a file called profile.py would replace a module of
    # the standard library; workers get this process's path.
    settings = {"PYTHONSAFEPATH": "1", **({LAUNCHER_PID: str(os.getpid())} if in_main_thread else {})}
    saved = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        with replaced_handlers((signal.SIGINT,), signal.SIG_IGN):
            forkserver.ensure_running()
    finally:
        for name, value in saved.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def replaced_handlers(numbers: Sequence[int], handler: signal.Handlers | None = None) -> Iterator[None]:
    """Restore the handlers of these signals after the block, and set ``handler`` inside; only in the main thread."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in numbers} if in_main_thread else {}
    try:
        for number in before if handler is not None else ():
            signal.signal(number, handler)
        yield
    finally:
        for number, original in before.items():
            if original is not None:  # not set from Python
                signal.signal(number, original)
