"""The log of one rank's trials: rows are buffered during trials and sent to the coordinator between them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np

from stagewright.fabric.ranks.flow import Flow
from stagewright.fabric.ranks.sockets_engine import SocketEngine
from stagewright.fabric.ranks.torch_engine import TorchEngine
from stagewright.fabric.trials import row_type, step_type

_FLUSH_S = 0.5
_MAX_STEP_ROWS = 200_000  # step times per rank


class TrialLog:
    """Buffered rows of trial and step times."""

    def __init__(self, num_ranks: int, send: Callable[..., None], *, keep_steps: bool) -> None:
        self._rows = np.zeros(4096, dtype=row_type(num_ranks))
        self._steps = np.zeros(8192, dtype=step_type())
        self._num_rows = self._num_steps = self._num_steps_sent = 0
        self._keep_steps = keep_steps
        self._send = send
        self._flushed_s = time.perf_counter()

    def add(
        self,
        number: int,
        message: int,
        flow: Flow | None,
        trial: int,
        start: float,
        launched: float,
        end: float,
        retransmits: int,
        engine: SocketEngine | TorchEngine,
    ) -> None:
        if self._num_rows == len(self._rows):
            self.flush()
        wrong = flow is not None and not flow.is_correct(trial)
        self._rows[self._num_rows] = (
            number,
            message,
            wrong,
            flow is not None,
            retransmits,
            start,
            end - start,
            launched - start,
            engine.receive_wait_s,
            engine.send_wait_s,
        )
        self._num_rows += 1
        if flow is None or not self._keep_steps or isinstance(engine, TorchEngine):
            return
        num_steps = flow.program.num_steps
        if self._num_steps + num_steps > len(self._steps):
            self.flush()
        if self._num_steps_sent + num_steps > _MAX_STEP_ROWS or num_steps > len(self._steps):
            return
        for step in range(num_steps):
            sent, received = flow.sent_s[step], flow.received_s[step]
            self._steps[self._num_steps] = (
                number,
                message,
                step,
                sent - start if sent >= start else np.nan,
                received - start if received >= start else np.nan,
            )
            self._num_steps += 1
        self._num_steps_sent += num_steps

    def flush_if_due(self) -> None:
        if time.perf_counter() - self._flushed_s > _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        if self._num_rows:
            self._send("trials", {"rows": self._num_rows}, self._rows[: self._num_rows].tobytes())
        if self._num_steps:
            self._send("steps", {"rows": self._num_steps}, self._steps[: self._num_steps].tobytes())
        self._num_rows = self._num_steps = 0
        self._flushed_s = time.perf_counter()
        gc.collect(0)
