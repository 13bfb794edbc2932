"""Steps of a worker on the disk as soon as they end: what is left of a worker that was killed.

    events.journal            one record a step, each appended by one write: the system has it when that returns
    events.before.journal     the records before these, where only the last steps of a long run are kept

    length of    │ step i64, begin f64, end f64, │ new words: a list of JSON │ events: begin, end f64, bytes i64,
    the rest u32 │ note u16, length of words u16 │ (nothing where all known) │ stage, micro-batch, peer i32,
                 │                               │                           │ kind, stream, note u16

A text (kind, stream, note) is its place in the list of all words of the file so far, which has null too; a number that
is not there is -1. All numbers are little-endian. A worker whose end is orderly writes its events in one file
(``worker.py``) and removes this one. Half a record at the end, of a worker that was killed while it wrote, is left out.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["Journal", "JournalEvent", "RecordedStep", "journal_paths", "read_journal", "remove_journal", "rows_of"]

JournalEvent: TypeAlias = tuple[
    str, str, int | None, int | None, float, float, int | None, int | None, str | None
]  # kind, stream, stage, micro-batch, begin, end, bytes, peer, note; times in seconds of the worker's clock

_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<qddHH")
_EVENT = struct.Struct("<ddqiiiHHH")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One step of one worker, as it was recorded."""

    step: int
    """Which."""
    note: str | None
    """What more there is to say."""
    begin_s: float
    """When it began and ended."""
    end_s: float
    events: Sequence[JournalEvent]
    """What was done in it, in the order in which it ended."""


def rows_of(step: RecordedStep) -> Iterator[dict[str, Any]]:
    """A step as a run folder keeps it: itself, then its events by their begin.

    Nothing outlasts its step, and a collective beside computing counts from when the one before it is done.
    """
    yield _row(step.step, ("step", "compute", None, None, step.begin_s, step.end_s, None, None, step.note))
    timed = [(one[4], min(step.end_s, one[5]), one) for one in step.events]
    free_s = step.begin_s
    for at, (start_s, stop_s, one) in sorted(enumerate(timed), key=lambda each: each[1][1]):
        if one[1] == "collective":
            timed[at] = (max(start_s, free_s), stop_s, one)
            free_s = stop_s
    for start_s, stop_s, one in sorted(timed, key=lambda each: (each[0], -each[1])):
        yield _row(step.step, (*one[:4], start_s, stop_s, *one[6:]))


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
    """An append-only file of steps; what can't be written to it is let go, for a run is worth more than its record."""

    def __init__(self, folder: Path, most_steps: int | None = None) -> None:
        self._path, self._before = journal_paths(folder)
        self._most_steps = most_steps
        self._file: int | None = None
        remove_journal(folder)  # of an earlier run in this folder
        self._begin()

    def append(self, step: RecordedStep) -> None:
        """Hand a step to the system."""
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
        """Write no more; what was written stays."""
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
    """The journal of a worker's folder, and what came before it."""
    return folder / "events.journal", folder / "events.before.journal"


def remove_journal(folder: Path) -> None:
    """Its events are in another file, or of another run."""
    for path in journal_paths(folder):
        path.unlink(missing_ok=True)


def read_journal(folder: Path) -> list[RecordedStep]:
    """The whole records of a worker's journal, the oldest first; none where there is no journal."""
    found: list[RecordedStep] = []
    for path in reversed(journal_paths(folder)):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue
        at, words = 0, list[str | None]()
        while at + _LENGTH.size <= len(content):
            (length,) = _LENGTH.unpack_from(content, at)
            at += _LENGTH.size
            if at + length > len(content):
                break  # the writer was killed while writing it, or is writing it now
            try:
                found.append(_from_bytes(content[at : at + length], words))
            except (ValueError, IndexError, TypeError, struct.error):
                break  # a disk was damaged: what follows can't be found
            at += length
    return found


def _to_bytes(step: RecordedStep, words: dict[str | None, int]) -> bytes:
    """One record; words that are new are added."""
    events = tuple(step.events)  # a collective of another thread may still be added
    try:
        return _packed(step, events, words, b"")
    except KeyError:
        known = len(words)
        for word in (step.note, *(word for one in events for word in (one[0], one[1], one[8]))):
            words.setdefault(word, len(words))
        return _packed(step, events, words, json.dumps(list(words)[known:]).encode())


def _packed(step: RecordedStep, events: Sequence[JournalEvent], words: Mapping[str | None, int], new: bytes) -> bytes:
    """Row by row: column by column takes twice as long while the processor's cache holds a model's numbers."""
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
    at = _HEAD.size
    if length:
        words += json.loads(record[at : at + length])
    events = [
        (words[kind], words[stream], _known(stage), _known(place), begin, end, _known(size), _known(peer), words[note])
        for begin, end, size, stage, place, peer, kind, stream, note in _EVENT.iter_unpack(record[at + length :])
    ]
    return RecordedStep(step=number, note=words[about], begin_s=begin_s, end_s=end_s, events=events)


def _known(number: int) -> int | None:
    return None if number == -1 else number
