"""Incremental reading of a run folder, which is never modified.

    workers/N/metrics.jsonl     only appended bytes; a partial line waits for its rest
    workers/N/activity.txt      the current record
    other files                 plan, result, faults, processes: checked twice a second, read when changed

What can't be read is tried again at the next poll. For a folder of runs, the newest run is followed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from stagewright.engine.worker.faults import RECORD_BYTES, Doing, Fault, parse_doing, worker_folder
from stagewright.engine.worker.process import ProcessMark
from stagewright.errors import UsageError
from stagewright.files.json_values import parse_json
from stagewright.report.live.changes import (
    ActivitySeen,
    Change,
    FaultSeen,
    MetricsLine,
    PlanRead,
    ProcessSeen,
    ResultRead,
)
from stagewright.report.live.fold import fold
from stagewright.report.live.state import LiveState
from stagewright.runs.result import RunResult
from stagewright.runs.run_folder import RunFolder
from stagewright.runs.worker_folder import MAX_LINE_BYTES

SLOW_S = 0.5
"""Polling interval of files that seldom change."""

MAX_WORKERS = 4096
"""Workers of a run that can be followed: each has files that are read twenty times a second."""

_OLD_S = 60.0  # a record that was not written for this long has the time of its file
_MAX_BYTES = 4 * 2**20  # read at once from one file: a long history arrives in pieces

Content = TypeVar("Content")


class _OpenFile:
    """A file that stays open between reads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def _open(self) -> int:
        if self._file is None:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        return self._file

    def close(self) -> None:
        """Close the file; the next read opens the current one of that name."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class LineTail(_OpenFile):
    """The lines of a growing JSON Lines file."""

    _partial = b""
    _offset = 0

    def read_new(self) -> list[dict[str, Any]]:
        """Return the lines completed since the last call; invalid JSON is skipped."""
        try:
            content = os.pread(self._open(), _MAX_BYTES, self._offset)
        except OSError:
            return []
        self._offset += len(content)
        *complete, self._partial = (self._partial + content).split(b"\n")
        if len(self._partial) > MAX_LINE_BYTES:
            self._partial = b"\0"  # no line of ours is so long: what follows until the next line break is skipped
        lines = []
        for line in complete:
            try:
                values = parse_json(line)
            except ValueError:
                continue  # its writer was killed
            if isinstance(values, dict):
                lines.append(values)
        return lines


class _ActivityFile(_OpenFile):
    """A worker's activity record; the file is recreated when the worker restarts."""

    _last: bytes | None = None

    def read_new(self, now_s: float) -> tuple[Doing, float] | None:
        """Return the worker's activity and its time, if it has changed."""
        try:
            file = self._open()
            content = os.pread(file, RECORD_BYTES, 0).partition(b"\n")[0]
            if content == self._last:
                return None
            written_s = os.fstat(file).st_mtime if self._last is None else now_s
        except OSError:
            return None
        self._last = content
        doing = parse_doing(content)
        # The modification time of a mapped file lags behind, so it counts only if it is old.
        return None if doing is None else (doing, written_s if now_s - written_s > _OLD_S else now_s)


class _ReplacedFile:
    """A small file that is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None

    def read_new(self, read: Callable[[Path], Content | None]) -> Content | None:
        """Return its content, if it has changed."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if stamp == self._stamp:
            return None
        content = read(self.path)
        if content is not None:
            self._stamp = stamp
        return content


class RunTail:
    """Follows one run folder, or the newest run of a folder of runs."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        """The requested path."""
        self.folder: RunFolder | None = None
        """The run that is followed."""
        self.state = LiveState(name=self.path.name)
        self._slow_poll_s = 0.0
        self._damage: str | None = None

    def poll(self) -> LiveState:
        """Read what is new and return the state."""
        now_s = time.time()
        is_slow_poll = now_s - self._slow_poll_s >= SLOW_S or now_s < self._slow_poll_s
        if is_slow_poll:
            self._slow_poll_s = now_s
            newest = newest_run(self.path)
            if newest is not None and (self.folder is None or newest != self.folder.path):
                self._open(newest)
        if self.folder is None:
            return self.state
        for change in self._read_slow(now_s) if is_slow_poll else ():
            self.state = fold(self.state, change)
        for change in self._read_fast(now_s):
            self.state = fold(self.state, change)
        if self._damage != self.state.damaged:
            self.state = replace(self.state, damaged=self._damage)
        return self.state

    def close(self) -> None:
        if self.folder is not None:
            for metrics, activity in zip(self._metrics, self._activities, strict=True):
                metrics.close()
                activity.close()
        self.folder = None

    def _open(self, path: Path) -> None:
        self.close()
        self.folder = RunFolder(path)
        self.state = LiveState(name=path.name)
        self._plan, self._result = _ReplacedFile(path / "plan.toml"), _ReplacedFile(path / "result.json")
        self._verdict = _ReplacedFile(path / "fault.json")
        self._metrics: list[LineTail] = []
        self._activities: list[_ActivityFile] = []
        self._errors: list[_ReplacedFile] = []
        self._marks: list[_ReplacedFile] = []
        self._processes: dict[int, ProcessMark] = {}

    def _read_fast(self, now_s: float) -> Iterator[Change]:
        """Read metrics and activities."""
        for rank, (metrics, activity) in enumerate(zip(self._metrics, self._activities, strict=True)):
            for values in metrics.read_new():
                yield MetricsLine(rank=rank, values=values)
            update = activity.read_new(now_s)
            if update is not None:
                yield ActivitySeen(rank=rank, doing=update[0], at_s=update[1])

    def _read_slow(self, now_s: float) -> Iterator[Change]:
        """Read plan, processes, faults and result."""
        assert self.folder is not None
        folder = self.folder
        # Read the result first, so that everything written before it is read before the run counts as ended.
        result = self._result.read_new(_read_result)
        plan = self._plan.read_new(lambda path: self._read_plan(folder))
        if plan is not None:
            yield plan
            for rank in range(len(self._metrics), plan.plan.mesh.num_workers):
                worker = worker_folder(folder.path, rank)
                self._metrics.append(LineTail(worker / "metrics.jsonl"))
                self._activities.append(_ActivityFile(worker / "activity.txt"))
                self._errors.append(_ReplacedFile(worker / "error.json"))
                self._marks.append(_ReplacedFile(worker / "process.json"))
        yield from self._read_fast(now_s)  # a worker's last action, before its process is seen to be gone
        for rank, (mark, error) in enumerate(zip(self._marks, self._errors, strict=True)):
            process = mark.read_new(ProcessMark.read)
            if process is not None:
                self._processes[rank] = process
                self._activities[rank].close()  # a restarted worker has a new file
            if rank in self._processes and self.state.result is None:
                yield ProcessSeen(rank=rank, state=self._processes[rank].state(), at_s=now_s)
            fault = error.read_new(Fault.read)
            if fault is not None:
                yield FaultSeen(fault=fault)
        verdict = self._verdict.read_new(Fault.read)
        if verdict is not None:
            yield FaultSeen(fault=verdict, verdict=True)
        if result is not None:
            yield from self._read_fast(now_s)
            yield ResultRead(result=result)

    def _read_plan(self, folder: RunFolder) -> PlanRead | None:
        try:
            begun = folder.environment().get("begun")
            change = PlanRead(name=folder.name, plan=folder.plan(), begun=begun if isinstance(begun, str) else None)
            if change.plan.mesh.num_workers > MAX_WORKERS:
                raise UsageError(f"{change.plan.mesh} has more workers than can be followed: at most {MAX_WORKERS}")
        except UsageError as error:
            self._damage = str(error)
            return None
        self._damage = None
        return change


def newest_run(path: Path) -> Path | None:
    """Return a run folder itself, or the newest run of a folder of runs or of a study; None if it has none yet.

    Names start with the time, so the last name is the newest.
    """
    if (path / "study.json").is_file():
        path = path / "runs"
    if (path / "plan.toml").is_file() or (path / "workers").is_dir():
        return path
    try:
        names = sorted((child.name for child in path.iterdir() if not child.name.startswith(".")), reverse=True)
    except OSError:
        return None
    return next((path / name for name in names if (path / name / "plan.toml").is_file()), None)


def _read_result(path: Path) -> RunResult | None:
    try:
        return RunFolder(path.parent).result()
    except UsageError:  # incomplete, or of another version
        return None
