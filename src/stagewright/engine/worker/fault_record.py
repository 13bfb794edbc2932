"""Record why this worker failed: its fault and its last events are on disk before the process ends."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from stagewright.engine.worker.faults import Fault, activity, read_doing, worker_folder
from stagewright.engine.worker.placement import RankPlacement
from stagewright.engine.worker.process import ProcessMark
from stagewright.engine.worker.watchdog import StoreWatchdog, report_to_agent
from stagewright.errors import StagewrightError, UsageError
from stagewright.runs.result import RunResult
from stagewright.runs.run_folder import RunFolder
from stagewright.runs.worker_folder import WorkerFolder

SAVE_S = 1.5
"""Time limit for writing events on failure: the launcher waits two seconds before it kills a worker."""

_KILLED = "its process ended without a message (SIGKILL, or the system ran out of memory)"

_OWN_FILES = (__file__, str(Path(__file__).with_name("worker.py")))


class FaultRecord:
    """Writes this worker's fault and its unsaved events."""

    def __init__(self, placement: RankPlacement) -> None:
        self.placement = placement
        self.device = ""
        self.folder: Path | None = None
        self.watchdog: StoreWatchdog | None = None
        self._stacks: Any = None
        self._saving: threading.Thread | None = None
        self._lock = threading.Lock()

    def open(self, run_folder: Path) -> None:
        """Create the worker's files in the run folder."""
        folder = self.folder = worker_folder(run_folder, self.placement.rank)
        with contextlib.suppress(OSError):  # of an earlier attempt in this folder
            (folder / "error.json").unlink(missing_ok=True)
            if self.placement.rank == 0 and self.placement.launcher is None:
                for name in ("fault.json", "result.json"):
                    (run_folder / name).unlink(missing_ok=True)
        activity.open(folder / "activity.txt")
        with contextlib.suppress(UsageError):  # needed only by `stagewright watch`
            ProcessMark.of_this_process().write(folder / "process.json")
        if self.placement.launcher is not None and hasattr(signal, "SIGUSR1"):
            # The launcher asks a hanging worker for its stack; faulthandler answers even while the GIL is held.
            self._stacks = (folder / "stack.txt").open("w")
            faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=False)

    def write(self, fault: Fault) -> StagewrightError:
        """Write the fault, report it to the agent and to the other workers, and return it as an error."""
        if self.folder is not None:
            try:
                fault.write(self.folder / "error.json")
            except (OSError, UsageError):  # the disk is full, or the folder is gone
                activity.write_fault(fault)
            if self.placement.launcher is None:
                self._finish(fault)
        report_to_agent(fault)
        if self.watchdog is not None:
            self.watchdog.report(fault)
        self.save_events()
        return fault.error()

    def _finish(self, fault: Fault) -> None:
        """Write the result of a run without a launcher: worker 0 does, or the first one that is left."""
        assert self.folder is not None
        run_folder, rank = self.folder.parents[1], self.placement.rank
        gone = killed_workers(run_folder, self.placement.num_workers) if fault.kind == "lost-peer" else []
        if any(other not in gone for other in range(rank)):
            return
        cause = fault
        if gone:
            cause = replace(fault, worker=gone[0], device="", kind="killed", message=_KILLED, traceback="")
            cause = replace(cause, doing=read_doing(worker_folder(run_folder, gone[0]) / "activity.txt"))
        refused = cause.exit_code == UsageError.exit_code
        with contextlib.suppress(OSError, UsageError):
            cause.write(run_folder / "fault.json")
            RunFolder(run_folder).finish("refused" if refused else "failed", RunResult(error=cause.text()))

    def save_events(self) -> None:
        """Write recorded events that are not on disk yet, once and within a time limit."""
        with self._lock:
            if self._saving is None:
                self._saving = threading.Thread(target=self._save, name="stagewright-save", daemon=True)
                self._saving.start()
        self._saving.join(SAVE_S)

    def _save(self) -> None:
        module = sys.modules.get("stagewright.engine.worker.recorder")  # not imported: nothing was recorded
        if module is None or self.folder is None:
            return
        with contextlib.suppress(Exception):  # with a broken device or a full disk, the fault is still reported
            rows = module.recorder.rest(activity.now())
            if rows:
                WorkerFolder(self.folder).write_events(rows, quickly=True)


def killed_workers(run_folder: Path, num_workers: int) -> list[int]:
    """Return the workers whose process has ended on this machine without an error report."""
    gone = []
    for rank in range(num_workers):
        folder = worker_folder(run_folder, rank)
        mark = ProcessMark.read(folder / "process.json")
        if mark is not None and mark.state() == "gone" and not (folder / "error.json").exists():
            gone.append(rank)
    return gone


@contextlib.contextmanager
def record_faults(placement: RankPlacement) -> Iterator[FaultRecord]:
    """Record any exception raised inside, and raise it as one error."""
    record = FaultRecord(placement)
    try:
        yield record
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in _OWN_FILES:
            frames = frames.tb_next  # how the job was called does not explain its failure
        error.with_traceback(frames or error.__traceback__)
        fault = Fault.of(
            error, worker=placement.rank, device=record.device, doing=activity.now(), time_ns=time.time_ns()
        )
        if isinstance(error, UsageError) and record.folder is None:
            report_to_agent(fault)
            raise  # refused before there is a run folder
        raise record.write(fault) from error
