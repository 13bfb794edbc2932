"""SIGTERM ends a command of several runs as Ctrl-C does, not only the run that is going on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from stagewright.errors import RunTerminated

_AGAIN_S = 0.5  # until a SIGTERM whose exception was ignored is sent again


@contextlib.contextmanager
def sigterm_raises(what: str) -> Iterator[None]:
    """Raise RunTerminated on SIGTERM, in a run and between runs; ``what`` is named in its message.

    An exception that a signal raises inside a callback of the interpreter is ignored, so the signal is sent again until
    the block has ended.
    """
    pending: list[threading.Timer] = []
    is_over = threading.Event()

    def send_again() -> None:
        if not is_over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    def end(number: int, frame: object) -> None:
        pending.append(threading.Timer(_AGAIN_S, send_again))
        pending[-1].daemon = True
        pending[-1].start()
        raise RunTerminated(f"{what} was ended by {signal.Signals(number).name}")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        is_over.set()
        for timer in pending:
            timer.cancel()
            timer.join()
        signal.signal(signal.SIGTERM, before)
