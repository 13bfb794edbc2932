"""What a worker is doing now, and what is told when it fails.

``activity`` is this process's one record of what it does. The executor calls ``activity.begin(...)`` before each
action; that costs about a microsecond and goes into a mapped file of the run folder, so that the last action of a
worker can still be read after it was killed or while it is stopped:

    workers/3/activity.txt     count <tab> step <tab> stage <tab> micro-batch <tab> action <tab> shapes <newline>
    workers/3/error.json       a ``Fault``, written by the worker itself when it raises

Importing this module does not import torch: a worker opens its record before torch is there.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from stagewright.errors import RunError, StagewrightError, UsageError
from stagewright.files.atomic import save_text

__all__ = [
    "Activity",
    "Doing",
    "Fault",
    "FaultKind",
    "activity",
    "describe_shapes",
    "parse_doing",
    "read_doing",
    "root_cause",
    "worker_folder",
]

RECORD_BYTES = 1024

# raised: by its own code; lost-peer: because another worker left; killed: by a signal that was not ours;
# exited: without an error of its own; hung: no progress; overdue: the run's time limit.
FaultKind: TypeAlias = Literal["raised", "lost-peer", "killed", "exited", "hung", "overdue"]

# What torch, Gloo and NCCL say when the other side of a connection is gone.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing:
    """One moment of a worker's activity."""

    count: int = 0
    """Actions begun so far: what tells a slow worker from one that hangs."""
    step: int | None = None
    """The step, from 0."""
    stage: int | None = None
    """The stage, from 0."""
    microbatch: int | None = None
    """The micro-batch, from 0."""
    action: str = ""
    """A word or two: "forward", "receive activation", "load model"."""
    shapes: str = ""
    """Shapes and dtypes of what it works on, as text."""

    def __str__(self) -> str:
        parts = [
            f"{name} {number}"
            for name, number in (("step", self.step), ("stage", self.stage), ("micro-batch", self.microbatch))
            if number is not None
        ]
        parts += [self.action] if self.action else []
        parts += [f"shapes {self.shapes}"] if self.shapes else []
        return ", ".join(parts)


class Activity:
    """The one mutable record of what this process does; numbers are kept in memory and, once opened, in a file."""

    __slots__ = ("_map", "action", "count", "microbatch", "shapes", "stage", "step")

    def __init__(self) -> None:
        self.count = 0
        self.step: int | None = None
        self.stage: int | None = None
        self.microbatch: int | None = None
        self.action = ""
        self.shapes = ""
        self._map: mmap.mmap | None = None

    def open(self, path: Path) -> None:
        """Keep the record in this file too, from now on; a file system that can't map files leaves it in memory."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0" * RECORD_BYTES)
        with contextlib.suppress(OSError, ValueError), path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), RECORD_BYTES)
        self._write()

    def close(self) -> None:
        """Let go of the file."""
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
        """An action begins; counts as progress. Without ``step`` the step stays what it was."""
        self.count += 1
        self.action = action
        self.stage = stage
        self.microbatch = microbatch
        self.shapes = shapes
        if step is not None:
            self.step = step
        self._write()

    def turn(self, action: str) -> str:
        """The same work goes on with another action, such as waiting for its input; the action until now."""
        before, self.action = self.action, action
        self.count += 1
        self._write()
        return before

    def now(self) -> Doing:
        """A copy of the record."""
        return Doing(**{one.name: getattr(self, one.name) for one in fields(Doing)})

    def _write(self) -> None:
        if self._map is None:
            return
        text = f"{self.count}\t{self.step}\t{self.stage}\t{self.microbatch}\t{self.action}\t{self.shapes}"
        record = text.encode()[: RECORD_BYTES - 1] + b"\n"
        self._map[: len(record)] = record


activity = Activity()


def read_doing(path: Path) -> Doing:
    """What a worker's file says that it does; an empty record where there is none yet."""
    try:
        return parse_doing(path.read_bytes()[:RECORD_BYTES].partition(b"\n")[0]) or Doing()
    except OSError:
        return Doing()


def parse_doing(line: bytes) -> Doing | None:
    """What a record says, without its end of line; None where it says nothing."""
    try:
        count, step, stage, microbatch, action, shapes = line.decode(errors="replace").split("\t", 5)
        numbers = [None if text == "None" else int(text) for text in (step, stage, microbatch)]
        return Doing(
            count=int(count), step=numbers[0], stage=numbers[1], microbatch=numbers[2], action=action, shapes=shapes
        )
    except ValueError:
        return None


def _hint(error: BaseException) -> str:
    """What helps, where a library's sentence does not say it."""
    if "more than 1 value per channel" in str(error):
        return "; a micro-batch has too few samples for batch norm: use fewer micro-batches, or a larger batch"
    return ""


def describe_shapes(tensors: Iterable[Any]) -> str:
    """Shapes and dtypes as text, for ``Activity.begin``; best made once where shapes are static."""
    return ", ".join(f"{tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in tensors)


def worker_folder(run_folder: Path, worker: int) -> Path:
    """Where a worker's own files are."""
    return run_folder / "workers" / str(worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """How one worker failed."""

    worker: int | None
    """Its rank; None: the run as a whole."""
    kind: FaultKind
    """What happened to it."""
    message: str
    """One sentence: the error's type and text, or the signal."""
    device: str = ""
    """Its device, as the plan writes it."""
    doing: Doing = field(default_factory=Doing)
    """What it was doing."""
    traceback: str = ""
    """Where in the code; empty where it could not be asked, and for errors that say all in their sentence."""
    time_ns: int = 0
    """When, in nanoseconds since the epoch."""
    exit_code: int = 1
    """Of the command: 1 the run failed, 2 the input was wrong."""

    @classmethod
    def of(cls, error: BaseException, *, worker: int, device: str, doing: Doing, time_ns: int) -> Fault:
        """The fault of a worker whose code raised."""
        own = isinstance(error, StagewrightError)
        return cls(
            worker=worker,
            kind="lost-peer" if _lost_peer(error) else "raised",
            message=str(error) if own else f"{type(error).__name__}: {error}{_hint(error)}",
            device=device,
            doing=doing,
            traceback="" if own else "".join(traceback.format_exception(error)),
            time_ns=time_ns,
            exit_code=error.exit_code if isinstance(error, StagewrightError) else 1,
        )

    def error(self, log: Path | None = None) -> StagewrightError:
        """The one message that a person sees."""
        return (UsageError if self.exit_code == 2 else RunError)(self.text(log))

    def text(self, log: Path | None = None) -> str:
        """Who, what, doing what; then the traceback and where to read on."""
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
        """Write the file at once or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        save_text(json.dumps(asdict(self), indent=2) + "\n", path)

    @classmethod
    def read(cls, path: Path) -> Fault | None:
        """The fault in a file; None where there is none."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**data, "doing": Doing(**data["doing"])})
        except (OSError, ValueError, TypeError, KeyError):
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
    """The fault that came first: what others tell of a lost connection follows from it.

    A kill has no time of its own, but whoever was killed was not killed by a peer; an abort may be the last word of a
    library that lost its peer.
    """

    def order(fault: Fault) -> tuple[int, int]:
        if fault.kind == "killed":
            return (2 if "SIGABRT" in fault.message else 0, fault.time_ns)
        return ({"raised": 1, "exited": 3, "lost-peer": 4}.get(fault.kind, 5), fault.time_ns)

    return min(faults, key=order)


def _lost_peer(error: BaseException | None) -> bool:
    """Whether this error, or the one behind it, says that another worker has gone."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, (RuntimeError, OSError, RunError)) and any(words in text for words in _LOST_PEER):
            return True
        error = error.__cause__
    return False
