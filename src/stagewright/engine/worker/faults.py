"""A worker's current action, and the report of its failure.

``activity`` records what this process does. The executor calls ``activity.begin(...)`` before each action; that costs
about a microsecond and writes to a mapped file of the run folder, so the last action of a worker can be read even after
it was killed or while it is stopped:

    workers/3/activity.txt     count <tab> step <tab> stage <tab> micro-batch <tab> action <tab> shapes <newline>
    workers/3/error.json       a ``Fault``, written by the worker when it raises

Importing this module does not import torch: a worker opens its record before torch is imported.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from stagewright.errors import RunError, StagewrightError, UsageError
from stagewright.files.atomic import save_text
from stagewright.files.json_values import from_json, parse_json, read_object

RECORD_BYTES = 1024
FILE_BYTES = 8192
"""The record, and room for a fault that can't be written elsewhere: on a full disk, only this file has space."""

# raised: an exception; lost-peer: another worker is gone; killed: by a signal that the launcher did not send;
# exited: without an error report; hung: no progress; overdue: the run's time limit.
FaultKind: TypeAlias = Literal["raised", "lost-peer", "killed", "exited", "hung", "overdue"]

# In the errors of torch, Gloo and NCCL when the other side of a connection is gone.
_LOST_PEER = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "socket closed",
    "failed to recv",
    "recvvalue failed",
    "sendbytes failed",
    "remote process",
    "gloo/transport/tcp",
    "nccl error",
    "ncclremoteerror",
    "store might be unavailable",
)


@dataclass(slots=True, kw_only=True)
class Doing:
    """One moment of a worker's activity."""

    count: int = 0
    """Actions begun so far; distinguishes a slow worker from a hanging one."""
    step: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    action: str = ""
    """A word or two: "forward", "receive activation", "load model"."""
    shapes: str = ""
    """Shapes and dtypes of the inputs, as text."""

    def __str__(self) -> str:
        parts = [
            f"{name} {number}"
            for name, number in (("step", self.step), ("stage", self.stage), ("micro-batch", self.microbatch))
            if number is not None
        ]
        parts += [self.action] if self.action else []
        parts += [f"shapes {self.shapes}"] if self.shapes else []
        return ", ".join(parts)


@dataclass(slots=True, kw_only=True)
class Activity(Doing):
    """What this process does now, in memory and, once opened, in a file."""

    _map: mmap.mmap | None = None

    def open(self, path: Path) -> None:
        """Write the record to this file from now on; without mmap support it stays in memory."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0" * FILE_BYTES)
        with contextlib.suppress(OSError, ValueError), path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), FILE_BYTES)
        self._write()

    def close(self) -> None:
        """Close the file."""
        if self._map is not None:
            self._map.close()
            self._map = None

    def begin(
        self,
        action: str,
        *,
        step: int | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        shapes: str = "",
    ) -> None:
        """Begin an action, which counts as progress; without ``step`` the step stays the same."""
        self.count += 1
        self.action = action
        self.stage = stage
        self.microbatch = microbatch
        self.shapes = shapes
        if step is not None:
            self.step = step
        self._write()

    def switch(self, action: str) -> str:
        """Continue the same work with another action, such as waiting for input; return the previous action."""
        before, self.action = self.action, action
        self.count += 1
        self._write()
        return before

    def write_fault(self, fault: Fault) -> None:
        """Write a fault behind the record; its traceback is cut to fit."""
        if self._map is None:
            return
        for kept in (fault.traceback[-4000:], ""):
            text = json.dumps(asdict(replace(fault, traceback=kept, message=fault.message[:1500]))).encode() + b"\n"
            if len(text) <= FILE_BYTES - RECORD_BYTES:
                self._map[RECORD_BYTES : RECORD_BYTES + len(text)] = text
                return

    def now(self) -> Doing:
        """Return a copy of the record."""
        return Doing(**{item.name: getattr(self, item.name) for item in fields(Doing)})

    def _write(self) -> None:
        if self._map is None:
            return
        text = f"{self.count}\t{self.step}\t{self.stage}\t{self.microbatch}\t{self.action}\t{self.shapes}"
        record = text.encode()[: RECORD_BYTES - 1] + b"\n"
        self._map[: len(record)] = record


activity = Activity()


def read_doing(path: Path) -> Doing:
    """Read a worker's activity file; an empty record where it does not exist yet."""
    try:
        return parse_doing(path.read_bytes()[:RECORD_BYTES].partition(b"\n")[0]) or Doing()
    except OSError:
        return Doing()


def read_reserved_fault(path: Path) -> Fault | None:
    """Read a fault that a worker could write to its activity file only; None where there is none."""
    try:
        text = path.read_bytes()[RECORD_BYTES:FILE_BYTES].partition(b"\n")[0].strip(b"\0")
        return from_json(Fault, parse_json(text)) if text else None
    except (OSError, ValueError):
        return None


def parse_doing(line: bytes) -> Doing | None:
    """Parse a record without its end of line; None where it is empty or damaged."""
    try:
        count, step, stage, microbatch, action, shapes = line.decode(errors="replace").split("\t", 5)
        numbers = [None if text == "None" else int(text) for text in (step, stage, microbatch)]
        return Doing(
            count=int(count), step=numbers[0], stage=numbers[1], microbatch=numbers[2], action=action, shapes=shapes
        )
    except ValueError:
        return None


def describe_shapes(tensors: Iterable[Any]) -> str:
    """Format shapes and dtypes for ``Activity.begin``; compute it once where shapes are static."""
    return ", ".join(f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)


def worker_folder(run_folder: Path, worker: int) -> Path:
    """Return the folder of a worker's files."""
    return run_folder / "workers" / str(worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """How one worker failed."""

    worker: int | None
    """Rank; None for the run as a whole."""
    kind: FaultKind
    message: str
    """One sentence: the error's type and text, or the signal."""
    device: str = ""
    doing: Doing = field(default_factory=Doing)
    traceback: str = ""
    """Stack; empty where it is unknown, and for errors whose message is complete."""
    time_ns: int = 0
    """Since the epoch."""
    exit_code: int = 1
    """Exit code of the command: 1 the run failed, 2 the input was wrong."""

    @classmethod
    def of(cls, error: BaseException, *, worker: int, device: str, doing: Doing, time_ns: int) -> Fault:
        """Build the fault of a worker whose code raised."""
        is_complete = isinstance(error, StagewrightError)
        if isinstance(error, SystemExit):
            code = "" if error.code is None else repr(error.code)
            return cls(
                worker=worker,
                kind="exited",
                message=f"its code called sys.exit({code}) before the job was done",
                device=device,
                doing=doing,
                traceback="".join(traceback.format_exception(error)),
                time_ns=time_ns,
            )
        hint = ""
        if "more than 1 value per channel" in str(error):
            hint = "; a micro-batch has too few samples for batch norm: use fewer micro-batches, or a larger batch"
        return cls(
            worker=worker,
            kind="lost-peer" if _lost_peer(error) else "raised",
            message=str(error) if is_complete else f"{type(error).__name__}: {error}{hint}",
            device=device,
            doing=doing,
            traceback="" if is_complete else "".join(traceback.format_exception(error)),
            time_ns=time_ns,
            exit_code=error.exit_code if isinstance(error, StagewrightError) else 1,
        )

    def error(self, log: Path | None = None) -> StagewrightError:
        """Return the error to show to the user."""
        return (UsageError if self.exit_code == 2 else RunError)(self.text(log))

    def text(self, log: Path | None = None) -> str:
        """Format worker, message and action, then the log file and the traceback."""
        who = "the run" if self.worker is None else f"worker {self.worker}"
        who += f" ({self.device})" if self.device else ""
        refused = self.kind == "raised" and self.exit_code == UsageError.exit_code
        lines = [f"{who} {'refused' if refused else _VERBS[self.kind]}: {self.message}"]
        if str(self.doing):
            lines.append(f"  at: {self.doing}")
        if log is not None:
            lines.append(f"  log: {log}")
        if self.traceback:
            lines.append(self.traceback.rstrip())
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        save_text(json.dumps(asdict(self), indent=2) + "\n", path)

    @classmethod
    def read(cls, path: Path) -> Fault | None:
        """Read a file; None where it is missing or damaged."""
        try:
            return from_json(cls, read_object(path))
        except (OSError, ValueError, UsageError):
            return None


_VERBS: dict[FaultKind, str] = {
    "raised": "failed",
    "lost-peer": "lost its connection to another worker",
    "killed": "was killed",
    "exited": "ended",
    "hung": "hangs",
    "overdue": "was ended",
}


def root_cause(faults: list[Fault]) -> Fault:
    """Return the fault that caused the others: a lost connection is a consequence.

    The time of a kill is unknown, but no peer caused it; an abort may come from a library that lost its peer.
    """

    def order(fault: Fault) -> tuple[int, int]:
        if fault.kind == "killed":
            return (2 if "SIGABRT" in fault.message else 0, fault.time_ns)
        return ({"raised": 1, "exited": 3, "lost-peer": 4}.get(fault.kind, 5), fault.time_ns)

    return min(faults, key=order)


def _lost_peer(error: BaseException | None) -> bool:
    """Whether this error or its cause says that another worker is gone."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, (RuntimeError, OSError, RunError)) and any(words in text for words in _LOST_PEER):
            return True
        error = error.__cause__
    return False
