"""When torch's profiler may be started and stopped: not in backward, and not in a span that began while it was running.

    optimizer.step()
      with record_function("Optimizer.step#SGD.step"):
        …                                                 the profiler keeps a pointer to this span
        post hooks ── the step is over ──► stop here?     no: the span's end would be written to freed memory
      ◄── stop here

A user's spans, and backward with an optimizer in its hooks, are waited for too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.profiler import record_function


class OpenSpans:
    """The spans of this thread that began since ``watch`` and have not ended."""

    def __init__(self, stack: ExitStack) -> None:
        """Watch spans until the stack is closed, and longer if a call waits for them."""
        self._open: set[int] = set()
        self._thread: int | None = None
        self._waiting: Callable[[], None] | None = None
        self._is_closed = False
        self._enter: Callable[[Any], Any] = record_function.__enter__
        self._exit: Callable[..., None] = record_function.__exit__
        enter: Callable[[Any], Any] = self._enter
        leave: Callable[..., None] = self._exit

        def __enter__(span: Any) -> Any:
            if self._thread == threading.get_ident():
                self._open.add(id(span))
            return enter(span)

        def __exit__(span: Any, *error: Any) -> None:
            leave(span, *error)
            self._open.discard(id(span))
            self._call()

        record_function.__enter__, record_function.__exit__ = __enter__, __exit__  # type: ignore[method-assign]
        stack.callback(self._close)

    def watch(self) -> None:
        """Begin with the spans of this thread: the profiler was started."""
        self._open.clear()
        self._thread = threading.get_ident()

    def begin(self, name: str) -> Any:
        """Begin a span that is not waited for."""
        span = record_function(name)
        self._enter(span)
        return span

    def end(self, span: Any) -> None:
        """End a span of ``begin``."""
        self._exit(span, None, None, None)

    def call_when_ended(self, function: Callable[[], None]) -> None:
        """Call a function now, or when the last span and backward have ended; one function waits at a time."""
        self._waiting = function
        self._call()

    def _call(self) -> None:
        if self._waiting is None or self._open or self._thread not in (None, threading.get_ident()):
            return
        if torch._C._current_graph_task_id() != -1:
            return  # in backward, whose spans begin outside of Python, and at whose end the thread's state is restored
        function, self._waiting, self._thread = self._waiting, None, None
        function()
        if self._is_closed:
            self._close()

    def _close(self) -> None:
        self._is_closed = True
        if self._waiting is None:
            record_function.__enter__, record_function.__exit__ = self._enter, self._exit  # type: ignore[method-assign]
