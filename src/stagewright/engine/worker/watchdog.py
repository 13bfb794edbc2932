"""Tell a slow run from one that hangs, and find the worker to blame.

A run hangs when *no* worker has begun an action for a given time: a single slow worker makes its peers wait, but it
goes on itself. The local launcher reads the counts from the workers' mapped files (which works for a stopped process
too); under ``torchrun``, perhaps on many machines, each worker's ``StoreWatch`` adds its own count to one sum in the
agent's store and reads there as well whether another worker has failed. In a loop of one's own (``own_loop.py``) a
worker is often ``OUTSIDE``, in its user's code, which may take its time: where all are, nothing hangs.
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

from stagewright.engine.worker.faults import Activity, Doing, Fault, FaultKind

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = [
    "HANG_S",
    "OUTSIDE",
    "STARTING",
    "START_S",
    "ProgressClock",
    "StoreWatch",
    "blame",
    "is_stopped",
    "tell_agent",
]

HANG_S = 300.0
"""Without progress for so long a run is ended, unless its user says otherwise."""

START_S = 120.0
"""Until every worker has begun its job a run may take at least so long: importing torch is one long action."""

STARTING = ("", "connect", "join", "capture")
"""What a worker does before its job, or what first imports a good part of torch."""

OUTSIDE = "code of your own"
"""What a worker does between the calls of a trainer."""

# A worker that does one of these waits for others, so another one is to blame.
_WAITING = ("receive", "send", "wait", "reduce", "gather", "scatter", "broadcast", "barrier", "join", "finish")


class ProgressClock:
    """Knows since when a count has not changed."""

    def __init__(self, hang_s: float, now_s: float) -> None:
        self._hang_s = hang_s
        self._count = -1
        self._changed_s = now_s

    def overdue(self, count: int, now_s: float, *, starting: bool = False, idle: bool = False) -> float | None:
        """For how long the count has stood still, if that is too long; to be asked again and again."""
        if count != self._count or idle:
            self._count, self._changed_s = count, now_s
        still_s = now_s - self._changed_s
        return still_s if still_s >= (max(self._hang_s, START_S) if starting else self._hang_s) else None


def blame(doings: Sequence[Doing], stopped: Sequence[bool], running: Sequence[bool]) -> int:
    """The worker that the others wait for: a stopped one, else one that does not wait, else the least advanced.

    Workers that have ended well are not asked, unless all have.
    """

    def innocence(worker: int) -> tuple[bool, bool, bool, int]:
        return (not running[worker], not stopped[worker], _waits(doings[worker].action), doings[worker].count)

    return min(range(len(doings)), key=innocence)


def _waits(action: str) -> bool:
    """Whether a worker that does this waits for others."""
    return any(word in action for word in _WAITING)


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped (SIGSTOP, a debugger); False where the system does not tell."""
    with contextlib.suppress(OSError, IndexError):
        # "1234 (a name) with spaces) T 1 …": the state follows the last bracket.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False


class StoreWatch:
    """A worker's thread that ends it where no one else can: another worker has failed, or the whole run hangs."""

    def __init__(
        self,
        store: Store,
        *,
        worker: int,
        device: str,
        activity: Activity,
        hang_s: float,
        end: Callable[[Fault], None],
        grace_s: float = 2.0,
    ) -> None:
        self._store = store
        self._worker, self._device, self._activity = worker, device, activity
        self._hang_s, self._grace_s = hang_s, grace_s
        self._end = end
        self._interval_s = min(0.5, hang_s / 10)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stagewright-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """The job is done: other workers may go on, and the store may vanish."""
        self._stop.set()
        self._thread.join()

    def tell(self, fault: Fault) -> None:
        """Tell the other workers, unless one of them was first."""
        with contextlib.suppress(Exception):  # the store may be gone, and this worker is ending anyway
            self._store.compare_set("failed", "", json.dumps(asdict(fault)))

    def _run(self) -> None:
        clock = ProgressClock(self._hang_s, time.monotonic())
        told, told_inside = 0, 0
        while not self._stop.wait(self._interval_s):
            count, outside = self._activity.count, self._activity.action == OUTSIDE
            try:
                total = self._store.add("progress", count - told)
                num_inside = self._store.add("inside", (not outside) - told_inside)
                told, told_inside = count, not outside
                first = self._first_fault()
            except Exception as error:
                if outside:  # a script may go on when the others have ended
                    return
                fault = self._fault("lost-peer", f"the launcher's store is gone ({type(error).__name__}: {error})")
            else:
                if first is not None:
                    # Most workers learn it sooner from a broken connection; with NCCL only from here.
                    fault = self._fault("lost-peer", f"worker {first['worker']} failed: {first['message']}")
                else:
                    starting = self._activity.action in STARTING
                    still_s = clock.overdue(total, time.monotonic(), starting=starting, idle=num_inside == 0)
                    if still_s is None:
                        continue
                    fault = self._fault("hung", f"no worker has made progress for {still_s:.0f} s")
                    first = self._told_by_another() if _waits(fault.doing.action) else None
                    if first is not None:
                        fault = self._fault("lost-peer", f"worker {first['worker']} failed: {first['message']}")
                    self.tell(fault)
            if not self._stop.wait(self._grace_s if fault.kind == "lost-peer" else 0):
                self._end(fault)
            return

    def _told_by_another(self) -> dict[str, object] | None:
        """Who waits lets the one it waits for speak first; where all wait, the first to lose patience does."""
        if self._stop.wait(self._grace_s):
            return None
        with contextlib.suppress(Exception):  # the store may be gone
            return self._first_fault()
        return None

    def _first_fault(self) -> dict[str, object] | None:
        if not self._store.check(["failed"]):
            return None
        found: dict[str, object] = json.loads(self._store.get("failed"))
        return found

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


def tell_agent(fault: Fault) -> None:
    """Let ``torchrun`` show this as the root cause."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        about = {"py_callstack": fault.traceback, "timestamp": str(fault.time_ns // 10**9)}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": fault.text(), "extraInfo": about}}))
