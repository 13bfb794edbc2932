"""The journal of a worker's steps, on disk as soon as each ends: survives a killed worker.

    events.journal            one record for each step, appended by one write call
    events.before.journal     the previous file, where only the last steps of a long run are kept

    length of    │ step i64, begin f64, end f64, │ new words: a JSON list    │ events: begin, end f64, bytes i64,
    the rest u32 │ note u16, length of words u16 │ (empty where all known)   │ stage, micro-batch, peer i32,
                 │                               │                           │ kind, stream, note u16

A text (kind, stream, note) is stored as its index in the list of all words of the file so far, which includes null; a
missing number is -1. All numbers are little-endian. A worker that ends normally writes its events to one file
(``worker_folder.py``) and removes the journal. An incomplete record at the end is ignored.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from stagewright.errors import UsageError
from stagewright.files.json_values import parse_json

MAX_FILE_BYTES = 2**30

JournalEvent: TypeAlias = tuple[
    str, str, int | None, int | None, float, float, int | None, int | None, str | None
]  # kind, stream, stage, micro-batch, begin, end, bytes, peer, note; times in seconds of the worker's clock

_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<qddHH")
_EVENT = struct.Struct("<ddqiiiHHH")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One recorded step of one worker."""

    step: int
    note: str | None
    begin_s: float
    end_s: float
    events: Sequence[JournalEvent]
    """In the order of their ends."""


def rows_of(step: RecordedStep) -> Iterator[dict[str, Any]]:
    """Yield the rows of a step for the run folder: the step, then its events by start time.

    Events are cut off at the end of the step, and an overlapped collective counts from the end of the one before it.
    """
    yield _row(step.step, ("step", "compute", None, None, step.begin_s, step.end_s, None, None, step.note))
    timed = [(event[4], min(step.end_s, event[5]), event) for event in step.events]
    free_s = step.begin_s
    for index, (start_s, stop_s, event) in sorted(enumerate(timed), key=lambda item: item[1][1]):
        if event[1] == "collective":
            timed[index] = (max(start_s, free_s), stop_s, event)
            free_s = stop_s
    for start_s, stop_s, event in sorted(timed, key=lambda item: (item[0], -item[1])):
        yield _row(step.step, (*event[:4], start_s, stop_s, *event[6:]))


def _row(number: int, event: JournalEvent) -> dict[str, Any]:
    kind, stream, stage, microbatch, start_s, end_s, num_bytes, peer, note = event
    return {
        "step": number,
        "kind": kind,
        "stream": stream,
        "stage": stage,
        "microbatch": microbatch,
        "start_s": start_s,
        "end_s": end_s,
        "bytes": num_bytes,
        "peer": peer,
        "note": note,
    }


class Journal:
    """An append-only file of steps; write errors are ignored, so that they do not end a run."""

    def __init__(self, folder: Path, most_steps: int | None = None) -> None:
        self._path, self._before = journal_paths(folder)
        self._most_steps = most_steps
        self._file: int | None = None
        remove_journal(folder)  # of an earlier run in this folder
        self._begin()

    def append(self, step: RecordedStep) -> None:
        """Write a step."""
        if self._file is None:
            return
        try:
            if self._count == self._most_steps:
                self.close()
                os.replace(self._path, self._before)
                self._begin()
            record = _to_bytes(step, self._words)
            if self._file is not None and os.write(self._file, record) < len(record):
                self.close()  # the disk is full
        except (OSError, struct.error):
            self.close()
        self._count += 1

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _begin(self) -> None:
        self._count = 0
        self._words: dict[str | None, int] = {}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError:
            self._file = None


def journal_paths(folder: Path) -> tuple[Path, Path]:
    """Return the paths of a worker's journal and of the previous one."""
    return folder / "events.journal", folder / "events.before.journal"


def remove_journal(folder: Path) -> None:
    """Remove a journal whose events are in another file or of another run."""
    for path in journal_paths(folder):
        path.unlink(missing_ok=True)


def read_journal(folder: Path) -> list[RecordedStep]:
    """Read the complete records of a worker's journal, oldest first; empty without a journal."""
    steps: list[RecordedStep] = []
    for path in reversed(journal_paths(folder)):
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise UsageError(f"{path} has more than {MAX_FILE_BYTES} bytes; is it a journal?")
            content = path.read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UsageError(f"can't read {path}: {error.strerror}") from None
        offset, words = 0, list[str | None]()
        while offset + _LENGTH.size <= len(content):
            (length,) = _LENGTH.unpack_from(content, offset)
            offset += _LENGTH.size
            if offset + length > len(content):
                break  # incomplete: the writer was killed, or is still writing
            try:
                steps.append(_from_bytes(content[offset : offset + length], words))
            except (ValueError, IndexError, TypeError, struct.error):
                break  # damaged: the following records can't be located
            offset += length
    return steps


def _to_bytes(step: RecordedStep, words: dict[str | None, int]) -> bytes:
    """Encode a record and add its new words."""
    events = tuple(step.events)  # another thread may still append a collective
    try:
        return _packed(step, events, words, b"")
    except KeyError:
        known = len(words)
        for word in (step.note, *(word for event in events for word in (event[0], event[1], event[8]))):
            words.setdefault(word, len(words))
        return _packed(step, events, words, json.dumps(list(words)[known:]).encode())


def _packed(step: RecordedStep, events: Sequence[JournalEvent], words: Mapping[str | None, int], new: bytes) -> bytes:
    """Pack row by row: by columns takes twice as long while the cache holds a model's tensors."""
    pack = _EVENT.pack
    rows = [
        pack(
            begin_s,
            end_s,
            -1 if num_bytes is None else num_bytes,
            -1 if stage is None else stage,
            -1 if microbatch is None else microbatch,
            -1 if peer is None else peer,
            words[kind],
            words[stream],
            words[note],
        )
        for kind, stream, stage, microbatch, begin_s, end_s, num_bytes, peer, note in events
    ]
    head = _HEAD.pack(step.step, step.begin_s, step.end_s, words[step.note], len(new))
    length = _HEAD.size + len(new) + _EVENT.size * len(rows)
    return b"".join((_LENGTH.pack(length), head, new, *rows))


def _from_bytes(record: bytes, words: list[str | None]) -> RecordedStep:
    number, begin_s, end_s, about, length = _HEAD.unpack_from(record)
    start = _HEAD.size
    if length:
        new = parse_json(record[start : start + length])
        if not isinstance(new, list) or not all(word is None or isinstance(word, str) for word in new):
            raise ValueError("the words of a record are not a list of texts")
        words += new
    events = [
        (
            words[kind],
            words[stream],
            _optional(stage),
            _optional(chunk),
            begin,
            end,
            _optional(size),
            _optional(peer),
            words[note],
        )
        for begin, end, size, stage, chunk, peer, kind, stream, note in _EVENT.iter_unpack(record[start + length :])
    ]
    return RecordedStep(step=number, note=words[about], begin_s=begin_s, end_s=end_s, events=events)


def _optional(number: int) -> int | None:
    return None if number == -1 else number
