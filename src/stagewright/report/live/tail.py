"""Read what is new in a run folder, again and again, and never touch it.

    workers/N/metrics.jsonl     only the bytes that were added; half a line waits for its other half
    workers/N/activity.txt      the one record, as it is now
    the rest                    plan, result, faults, processes: looked at twice a second, read when they have changed

What can't be read now is tried again the next time. A folder that holds runs is followed to the newest of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from stagewright.engine.worker.faults import RECORD_BYTES, Doing, Fault, parse_doing, worker_folder
from stagewright.engine.worker.process import ProcessMark
from stagewright.errors import UsageError
from stagewright.report.live.state import Alive, Change, Ended, Failed, Line, LiveState, PlanKnown, Seen, fold
from stagewright.runs.result import RunResult
from stagewright.runs.run_folder import RunFolder

__all__ = ["LineTail", "RunTail", "newest_run"]

SLOW_S = 0.5
"""Between two looks at what seldom changes."""

_OLD_S = 60.0  # a record that was not written for so long is as old as its file
_MOST_BYTES = 4 * 2**20  # read at once from one file: a long run's past comes in pieces

Content = TypeVar("Content")


class LineTail:
    """The lines of a growing file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._half = b""
        self._read = 0

    def new(self) -> list[dict[str, Any]]:
        """The lines that have become whole since the last time; what is not JSON is left out."""
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            content = os.pread(self._file, _MOST_BYTES, self._read)
        except OSError:
            return []
        self._read += len(content)
        *whole, self._half = (self._half + content).split(b"\n")
        found = []
        for line in whole:
            try:
                values = json.loads(line)
            except ValueError:
                continue  # a writer was killed while writing it
            if isinstance(values, dict):
                found.append(values)
        return found

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class _Record:
    """A worker's activity record; its file is made anew when the worker starts again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._last: bytes | None = None

    def new(self, now_s: float) -> tuple[Doing, float] | None:
        """What the worker does and since when, if that is news."""
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            content = os.pread(self._file, RECORD_BYTES, 0).partition(b"\n")[0]
            if content == self._last:
                return None
            written_s = os.fstat(self._file).st_mtime if self._last is None else now_s
        except OSError:
            return None
        self._last = content
        doing = parse_doing(content)
        # A mapped file's time lags behind, so it counts only where it is long ago.
        return None if doing is None else (doing, written_s if now_s - written_s > _OLD_S else now_s)

    def close(self) -> None:
        """Let go of the file; the next one that has its name is opened."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class _Changing:
    """A small file that is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None

    def new(self, read: Callable[[Path], Content | None]) -> Content | None:
        """Its content, if that is news."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        if stamp == self._stamp:
            return None
        content = read(self.path)
        if content is not None:
            self._stamp = stamp
        return content


class RunTail:
    """One run folder, or the newest one below a folder of runs; the state as far as it was read."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        """What was asked for."""
        self.folder: RunFolder | None = None
        """The run that is shown."""
        self.state = LiveState(name=self.path.name)
        self._slow_s = 0.0
        self._damage: str | None = None

    def poll(self) -> LiveState:
        """Take in what is new; the state after it."""
        now_s = time.time()
        slow = now_s - self._slow_s >= SLOW_S or now_s < self._slow_s
        if slow:
            self._slow_s = now_s
            found = newest_run(self.path)
            if found is not None and (self.folder is None or found != self.folder.path):
                self._open(found)
        if self.folder is None:
            return self.state
        for change in self._seldom(now_s) if slow else ():
            self.state = fold(self.state, change)
        for change in self._often(now_s):
            self.state = fold(self.state, change)
        if self._damage != self.state.damaged:
            self.state = replace(self.state, damaged=self._damage)
        return self.state

    def close(self) -> None:
        """Let go of all files."""
        if self.folder is not None:
            for lines, record in zip(self._lines, self._records, strict=True):
                lines.close()
                record.close()
        self.folder = None

    def _open(self, path: Path) -> None:
        self.close()
        self.folder = RunFolder(path)
        self.state = LiveState(name=path.name)
        self._plan, self._result = _Changing(path / "plan.toml"), _Changing(path / "result.json")
        self._verdict = _Changing(path / "fault.json")
        self._lines: list[LineTail] = []
        self._records: list[_Record] = []
        self._errors: list[_Changing] = []
        self._marks: list[_Changing] = []
        self._processes: dict[int, ProcessMark] = {}

    def _often(self, now_s: float) -> Iterator[Change]:
        for rank, (lines, record) in enumerate(zip(self._lines, self._records, strict=True)):
            for values in lines.new():
                yield Line(rank=rank, values=values)
            found = record.new(now_s)
            if found is not None:
                yield Seen(rank=rank, doing=found[0], at_s=found[1])

    def _seldom(self, now_s: float) -> Iterator[Change]:
        assert self.folder is not None
        folder = self.folder
        ended = self._result.new(
            _read_result
        )  # before the rest: what was written before the result is taken in with it
        plan = self._plan.new(lambda path: self._known(folder))
        if plan is not None:
            yield plan
            for rank in range(len(self._lines), plan.plan.mesh.num_workers):
                own = worker_folder(folder.path, rank)
                self._lines.append(LineTail(own / "metrics.jsonl"))
                self._records.append(_Record(own / "activity.txt"))
                self._errors.append(_Changing(own / "error.json"))
                self._marks.append(_Changing(own / "process.json"))
        yield from self._often(now_s)  # what a worker did last is known before it is found gone
        for rank, (mark, error) in enumerate(zip(self._marks, self._errors, strict=True)):
            known = mark.new(ProcessMark.read)
            if known is not None:
                self._processes[rank] = known
                self._records[rank].close()  # a worker that has started again has a new one
            if rank in self._processes and self.state.result is None:
                yield Alive(rank=rank, state=self._processes[rank].state(), at_s=now_s)
            fault = error.new(Fault.read)
            if fault is not None:
                yield Failed(fault=fault)
        verdict = self._verdict.new(Fault.read)
        if verdict is not None:
            yield Failed(fault=verdict, verdict=True)
        if ended is not None:
            yield from self._often(now_s)
            yield Ended(result=ended)

    def _known(self, folder: RunFolder) -> PlanKnown | None:
        try:
            begun = folder.environment().get("begun")
            found = PlanKnown(name=folder.name, plan=folder.plan(), begun=begun if isinstance(begun, str) else None)
        except UsageError as error:
            self._damage = str(error)
            return None
        self._damage = None
        return found


def newest_run(path: Path) -> Path | None:
    """A run folder itself; of a folder of runs the newest one; None where there is none yet.

    Names begin with the time, so the last one is the newest.
    """
    if (path / "plan.toml").is_file() or (path / "workers").is_dir():
        return path
    try:
        names = sorted((one.name for one in path.iterdir() if not one.name.startswith(".")), reverse=True)
    except OSError:
        return None
    return next((path / name for name in names if (path / name / "plan.toml").is_file()), None)


def _read_result(path: Path) -> RunResult | None:
    try:
        return RunFolder(path.parent).result()
    except UsageError:  # half written, or by another version
        return None
