"""Detect a hanging run, and find the worker that caused it.

A run hangs when *no* worker has begun an action for a given time: a single slow worker makes its peers wait, but it
makes progress itself. The local launcher reads the action counts from the workers' mapped files (which works for a
stopped process too). Under ``torchrun``, possibly on many machines, each worker's ``StoreWatchdog`` adds its count to a
total in the agent's store, where it also sees whether another worker has failed. In a user's training loop
(``user_loop.py``) a worker is often ``OUTSIDE``, in user code, which has no time limit: where all workers are outside,
nothing hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
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
        return still_s if still_s >= (max(self._hang_s, START_S) if starting else self._hang_s) else None


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
        activity: Activity = activity,
        grace_s: float = 2.0,
    ) -> None:
        self._store = store
        self._worker, self._device, self._activity = worker, device, activity
        self._hang_s, self._grace_s = hang_s, grace_s
        self._end = end
        self._interval_s = min(0.5, hang_s / 10)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stagewright-watch", daemon=True)

    def start(self) -> StoreWatchdog:
        """Start the thread; return self."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop the thread: the job is done, so the store may disappear."""
        self._stop.set()
        self._thread.join()

    def report(self, fault: Fault) -> None:
        """Report a fault to the other workers, unless one of them has reported first."""
        with contextlib.suppress(Exception):  # the store may be gone, and this worker is ending anyway
            self._store.compare_set("failed", "", json.dumps(asdict(fault)))

    def _run(self) -> None:
        clock = ProgressClock(self._hang_s, time.monotonic())
        reported, reported_inside = 0, 0
        while not self._stop.wait(self._interval_s):
            count, outside = self._activity.count, self._activity.action == OUTSIDE
            try:
                total = self._store.add("progress", count - reported)
                num_inside = self._store.add("inside", (not outside) - reported_inside)
                reported, reported_inside = count, not outside
                first = self._first_fault()
            except Exception as error:
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
                    first = self._fault_of_another() if _waits(fault.doing.action) else None
                    if first is not None:
                        fault = self._fault("lost-peer", f"worker {first['worker']} failed: {first['message']}")
                    self.report(fault)
            if not self._stop.wait(self._grace_s if fault.kind == "lost-peer" else 0):
                self._end(fault)
            return

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
