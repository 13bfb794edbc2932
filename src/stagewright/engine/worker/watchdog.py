"""Detect a hanging run, and find the worker that caused it.

A run hangs when *no* worker has begun an action for a given time: a single slow worker makes its peers wait, but it
makes progress itself. The local launcher reads the action counts from the workers' mapped files (which works for a
stopped process too). Under ``torchrun``, possibly on many machines, each worker's ``StoreWatchdog`` adds its count to a
total in the agent's store, where it also sees whether another worker has failed. A worker that no longer writes to the
store is stopped, or its machine or network is down: the others name it. Where the store itself does not answer, the
link to the first machine is down. In a user's training loop (``user_loop.py``) a worker is often ``OUTSIDE``, in user
code, which has no time limit: where all workers are outside, nothing hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.engine.worker.faults import Activity, Doing, Fault, FaultKind, activity

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

HANG_S = 300.0
"""Default time without progress after which a run is ended."""

START_S = 120.0
"""Minimum time limit until every worker has begun its job: importing torch is one long action."""

STARTING = ("", "connect", "join", "capture")
"""Actions before the job, or that import much of torch."""

OUTSIDE = "user code"
"""Action of a worker between the calls of a trainer."""

_SILENT_S = 2.0  # a worker that has written nothing for less may just be slow

# A worker in one of these actions waits for another, which caused the hang.
_WAITING = ("receive", "send", "wait", "reduce", "gather", "scatter", "broadcast", "barrier", "join", "finish")


class ProgressClock:
    """Measures how long a count has not changed."""

    def __init__(self, hang_s: float, now_s: float) -> None:
        self._hang_s = hang_s
        self._count = -1
        self._changed_s = now_s

    def overdue(self, count: int, now_s: float, *, starting: bool = False, idle: bool = False) -> float | None:
        """Return how long the count has not changed, if that exceeds the limit; call it periodically."""
        if count != self._count or idle:
            self._count, self._changed_s = count, now_s
        still_s = now_s - self._changed_s
        return still_s if still_s >= time_limit_s(self._hang_s, starting=starting) else None

    def is_half_overdue(self, now_s: float) -> bool:
        """Whether the count has not changed for half of the limit."""
        return now_s - self._changed_s >= self._hang_s / 2


def time_limit_s(hang_s: float, *, starting: bool) -> float:
    """Return the time without progress after which a run hangs."""
    return max(hang_s, START_S) if starting else hang_s


def blame(doings: Sequence[Doing], stopped: Sequence[bool], running: Sequence[bool]) -> int:
    """Return the worker that the others wait for: a stopped one, else one that does not wait, else the slowest.

    Workers that have finished are considered only where all have.
    """

    def innocence(worker: int) -> tuple[bool, bool, bool, int]:
        return (not running[worker], not stopped[worker], _waits(doings[worker].action), doings[worker].count)

    return min(range(len(doings)), key=innocence)


def _waits(action: str) -> bool:
    """Whether a worker in this action waits for others."""
    return any(word in action for word in _WAITING)


class _Heartbeats:
    """What each worker writes to the store, to be seen by the others: a count and its host's name."""

    def __init__(self, store: Store, worker: int, num_workers: int) -> None:
        self._store, self._worker = store, worker
        self._keys = [f"alive {rank}" for rank in range(num_workers)]
        self._host = socket.gethostname()
        self._count = 0
        self._noted: list[bytes] = []
        self._noted_s = 0.0

    def beat(self) -> None:
        """Write this worker's."""
        self._count += 1
        self._store.set(f"alive {self._worker}", f"{self._count} {self._host}")

    def finish(self) -> None:
        """Say that this worker is done, rather than silent."""
        with contextlib.suppress(Exception):  # the store may be gone
            self._store.set(f"alive {self._worker}", "")

    def note(self, now_s: float) -> None:
        """Remember what all have written, until ``forget``."""
        if not self._noted:
            self._noted, self._noted_s = self._read(), now_s

    def forget(self) -> None:
        self._noted = []

    def silent(self, now_s: float) -> str:
        """Name the workers that have written nothing since ``note``; empty if there are none or it was just now."""
        since_s = now_s - self._noted_s
        if not self._noted or since_s < _SILENT_S:
            return ""
        try:
            now = self._read()
        except Exception:
            return ""
        silent = [rank for rank, text in enumerate(now) if text and text == self._noted[rank] and rank != self._worker]
        if not silent:
            return ""
        hosts = ", ".join(sorted({now[rank].decode().partition(" ")[2] for rank in silent}))
        who = f"worker {silent[0]} on {hosts} has" if len(silent) == 1 else f"workers {silent} on {hosts} have"
        return f"{who} not answered for {since_s:.0f} s: stopped, or that machine or the network to it is down"

    def _read(self) -> list[bytes]:
        return [self._store.get(key) if self._store.check([key]) else b"" for key in self._keys]


class StoreWatchdog:
    """Thread that ends its worker where another worker has failed or the whole run hangs."""

    def __init__(
        self,
        store: Store,
        *,
        worker: int,
        device: str,
        hang_s: float,
        end: Callable[[Fault], None],
        num_workers: int = 1,
        address: str = "",
        activity: Activity = activity,
        grace_s: float = 2.0,
    ) -> None:
        """``address``: of the store, for messages."""
        self._store = store
        self._address = address
        self._asked_s: float | None = None  # since when the store has not answered
        self._heartbeats = _Heartbeats(store, worker, num_workers)
        self._worker, self._device, self._activity = worker, device, activity
        self._hang_s, self._grace_s = hang_s, grace_s
        self._end = end
        self._interval_s = min(0.5, hang_s / 10)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stagewright-watch", daemon=True)
        self._guard = threading.Thread(target=self._watch_store, name="stagewright-store", daemon=True)

    def start(self) -> StoreWatchdog:
        """Start the threads; return self."""
        self._thread.start()
        self._guard.start()
        return self

    def stop(self) -> None:
        """Stop the threads: the job is done, so the store may disappear."""
        self._stop.set()
        self._thread.join(self._grace_s)  # it is daemonic: a store that does not answer keeps no one
        self._guard.join()

    def report(self, fault: Fault) -> None:
        """Report a fault to the other workers, unless one of them has reported first."""

        def write() -> None:
            with contextlib.suppress(Exception):  # the store may be gone, and this worker is ending anyway
                self._store.compare_set("failed", "", json.dumps(asdict(fault)))

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        thread.join(0 if self._is_silent() else self._grace_s)

    def _run(self) -> None:
        clock = ProgressClock(self._hang_s, time.monotonic())
        reported, reported_inside = 0, 0
        self._asked_s = time.monotonic()
        with contextlib.suppress(Exception):  # the loop reports it
            self._heartbeats.beat()  # at once: a link may be cut within the first interval
        self._asked_s = None
        while not self._stop.wait(self._interval_s):
            count, outside = self._activity.count, self._activity.action == OUTSIDE
            self._asked_s = time.monotonic()
            try:
                total = self._store.add("progress", count - reported)
                num_inside = self._store.add("inside", (not outside) - reported_inside)
                reported, reported_inside = count, not outside
                self._heartbeats.beat()
                if clock.is_half_overdue(time.monotonic()):
                    self._heartbeats.note(time.monotonic())
                else:
                    self._heartbeats.forget()
                first = self._first_fault()
                self._asked_s = None
            except Exception as error:
                self._asked_s = None
                if outside:  # a script may continue after the others have ended
                    return
                fault = self._fault("lost-peer", f"the launcher's store is gone ({type(error).__name__}: {error})")
            else:
                if first is not None:
                    # With Gloo a broken connection shows it sooner; with NCCL only the store does.
                    fault = self._fault("lost-peer", f"worker {first['worker']} failed: {first['message']}")
                else:
                    starting = self._activity.action in STARTING
                    still_s = clock.overdue(total, time.monotonic(), starting=starting, idle=num_inside == 0)
                    if still_s is None:
                        continue
                    fault = self._fault("hung", f"no worker has made progress for {still_s:.0f} s")
                    silent = self._heartbeats.silent(time.monotonic())
                    first = None
                    if silent:
                        fault = self._fault("lost-peer", silent)
                    elif _waits(fault.doing.action):
                        first = self._fault_of_another()
                    if first is not None:
                        fault = self._fault("lost-peer", f"worker {first['worker']} failed: {first['message']}")
                    self.report(fault)
                    if silent:
                        self._end(fault)
                        return
            if not self._stop.wait(self._grace_s if fault.kind == "lost-peer" else 0):
                self._end(fault)
            return
        self._heartbeats.finish()

    def _watch_store(self) -> None:
        """End this worker where the store does not answer: a broken link gives no error for many minutes."""
        while not self._stop.wait(min(0.1, self._interval_s)):
            if self._is_silent() and self._activity.action != OUTSIDE:
                at = f" at {self._address}" if self._address else ""
                message = f"the store{at} has not answered for {self._hang_s:.0f} s"
                self._end(self._fault("lost-peer", f"{message}: that machine, or the network to it, is down"))
                return

    def _is_silent(self) -> bool:
        """Whether the store has not answered for the time limit."""
        asked_s, starting = self._asked_s, self._activity.action in STARTING
        return asked_s is not None and time.monotonic() - asked_s >= time_limit_s(self._hang_s, starting=starting)

    def _fault_of_another(self) -> dict[str, object] | None:
        """Give the worker that this one waits for time to report first; where all wait, the first timeout reports."""
        if self._stop.wait(self._grace_s):
            return None
        with contextlib.suppress(Exception):  # the store may be gone
            return self._first_fault()
        return None

    def _first_fault(self) -> dict[str, object] | None:
        if not self._store.check(["failed"]):
            return None
        fault: dict[str, object] = json.loads(self._store.get("failed"))
        return fault

    def _fault(self, kind: FaultKind, message: str) -> Fault:
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        return Fault(
            worker=self._worker,
            kind=kind,
            message=message,
            device=self._device,
            doing=self._activity.now(),
            traceback="".join(traceback.format_stack(main)) if kind == "hung" and main is not None else "",
            time_ns=time.time_ns(),
        )


def report_to_agent(fault: Fault) -> None:
    """Make ``torchrun`` show this fault as the root cause."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        about = {"py_callstack": fault.traceback, "timestamp": str(fault.time_ns // 10**9)}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": fault.text(), "extraInfo": about}}))
