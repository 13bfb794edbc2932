"""The index of runs: one SQLite file next to the run folders, for lists and comparisons.

It contains nothing that the folders do not, so it may be deleted at any time: a damaged or outdated file is rebuilt, in
memory where the disk is not writable. A run is read again when its plan or its result has changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stagewright.errors import UsageError
from stagewright.files.json_values import from_json, parse_json, read_object
from stagewright.runs.result import RunResult
from stagewright.runs.run_folder import RunFolder

INDEX_NAME = ".stagewright-runs.sqlite"
_VERSION = 2  # of the table below; another version is rebuilt
# The file is valid, but not writable or locked by another process.
_NOT_WRITABLE = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_FULL")
_PLAN, _FABRIC = "plan.toml", "fabric.json"  # a run of a plan, or of collectives alone
_DEPTH = 3  # maximum depth of runs below the root


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run in a list; unknown values are None."""

    name: str
    """Folder, relative to the root."""
    status: str
    """done, failed, refused (impossible request), interrupted, unfinished (running or killed) or damaged."""
    begun: str | None = None
    """Start time in ISO 8601."""
    ended: str | None = None
    model: str | None = None
    strategy: str | None = None
    """serial, data, tensor, pipeline, or several with ×; fabric for collectives alone."""
    mesh: str | None = None
    """Size of each axis: "data=2,pipeline=2"."""
    workers: int | None = None
    batch: int | None = None
    """Global batch."""
    microbatches: int | None = None
    """Micro-batches per step and replica."""
    schedule: str | None = None
    training: bool | None = None
    """Forward and backward, or forward only."""
    samples_per_s: float | None = None
    speedup: float | None = None
    """Over the single-device baseline."""
    equal: bool | None = None
    """Whether it passed the parity check."""
    peak_memory_bytes: int | None = None
    """Of the worker with the highest peak."""
    loss: float | None = None
    accuracy: float | None = None
    """On the task's evaluation split."""
    p50_s: float | None = None
    """Median time of a trial of a fabric run."""
    error: str | None = None
    """Why it failed or can't be read."""


class RunIndex:
    """The runs below a root; updated when it is opened."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._database = self._open()

    def rows(self) -> list[RunRow]:
        """Return all runs, newest first."""
        rows = self._database.execute("SELECT row FROM runs ORDER BY begun DESC, name DESC").fetchall()
        return [_read_row(row) for (row,) in rows]

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> RunIndex:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self) -> sqlite3.Connection:
        if not self.root.is_dir():
            return self._connect(":memory:")
        path = self.root / INDEX_NAME
        for _ in range(0 if _is_foreign(path) else 2):
            try:
                return self._connect(str(path))
            except (sqlite3.DatabaseError, ValueError, TypeError) as error:
                if getattr(error, "sqlite_errorname", "").startswith(_NOT_WRITABLE):
                    break
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        return self._connect(":memory:")

    def _connect(self, file: str) -> sqlite3.Connection:
        """Connect to the index and update it."""
        database = sqlite3.connect(file, timeout=5.0)
        try:
            with database:
                database.execute("BEGIN IMMEDIATE")
                if database.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
                    database.execute("DROP TABLE IF EXISTS runs")
                    database.execute(f"PRAGMA user_version = {_VERSION}")
                database.execute(
                    "CREATE TABLE IF NOT EXISTS runs (name TEXT PRIMARY KEY, stamp TEXT, begun TEXT, model TEXT, "
                    "strategy TEXT, status TEXT, samples_per_s REAL, row TEXT)"
                )
                self._refresh(database)
                for (row,) in database.execute("SELECT row FROM runs ORDER BY begun DESC, name DESC"):
                    _read_row(row)
        except BaseException:
            database.close()
            raise
        return database

    def _refresh(self, database: sqlite3.Connection) -> None:
        stored = dict(database.execute("SELECT name, stamp FROM runs").fetchall())
        seen = set()
        for folder in _run_folders(self.root, _DEPTH):
            # A name that is not UTF-8 is shown with escapes.
            name = os.fsencode(folder.relative_to(self.root)).decode("utf-8", "backslashreplace")
            stamp = _stamp(folder)
            seen.add(name)
            if stored.get(name) != stamp:
                row = _plan_row(RunFolder(folder), name) if (folder / _PLAN).is_file() else _fabric_row(folder, name)
                texts = [
                    _storable(text) for text in (name, stamp, row.begun or "", row.model, row.strategy, row.status)
                ]
                columns = (*texts, row.samples_per_s)
                database.execute(
                    "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*columns, json.dumps(asdict(row)))
                )
        database.executemany("DELETE FROM runs WHERE name = ?", [(name,) for name in stored if name not in seen])
        names = [name for (name,) in database.execute("SELECT name FROM runs")]
        if sorted(map(str, names)) != sorted(seen):
            raise ValueError("the index is damaged: its rows are not the runs")


def _is_foreign(path: Path) -> bool:
    """Whether the file is a link, or a database with tables of another program: it is left alone."""
    if path.is_symlink():
        return True
    try:
        address = f"{path.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, timeout=0.1, uri=True)) as database:
            version = database.execute("PRAGMA user_version").fetchone()[0]
            tables = {name: sql or "" for name, sql in database.execute("SELECT name, sql FROM sqlite_master")}
    except (sqlite3.Error, ValueError):
        return False  # no file yet, or a damaged one
    own = {"runs", "sqlite_autoindex_runs_1"}
    is_own = set(tables) <= own and (version == _VERSION or "stamp TEXT" in tables.get("runs", ""))
    return bool(tables) and not is_own


def _read_row(text: object) -> RunRow:
    """Read a row; ValueError where it is damaged."""
    if not isinstance(text, str | bytes):
        raise ValueError("a row of the index is not text")
    return from_json(RunRow, parse_json(text))


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Yield all run folders; hidden ones are being created."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                continue
            path = folder / entry.name
            if (path / _PLAN).is_file() or (path / _FABRIC).is_file():
                yield path
            if depth > 1 and not (path / "workers").is_dir():
                yield from _run_folders(path, depth - 1)


def _storable(text: str | None) -> str | None:
    """Return a text that SQLite can store: lone surrogates, which JSON may have, become escapes."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _stamp(folder: Path) -> str:
    """Return a stamp that changes with the plan and the result."""
    parts = []
    for name in (_PLAN, _FABRIC, "environment.json", "result.json"):
        try:
            state = (folder / name).stat()
            parts.append(f"{state.st_mtime_ns}:{state.st_size}:{state.st_ino}")
        except OSError:
            parts.append("none")
    return " ".join(parts)


def _plan_row(folder: RunFolder, name: str) -> RunRow:
    try:
        plan, environment, result = folder.plan(), folder.environment(), folder.result()
    except UsageError as error:
        return RunRow(name=name, status="damaged", error=str(error))
    begun = environment.get("begun")
    return RunRow(
        name=name,
        status=result.status if result is not None else "unfinished",
        begun=begun if isinstance(begun, str) else None,
        model=plan.model.name,
        strategy=plan.mesh.strategy,
        mesh=str(plan.mesh),
        workers=plan.mesh.num_workers,
        batch=plan.batch,
        microbatches=plan.microbatches,
        schedule=plan.schedule if plan.mesh.pipeline > 1 else None,
        training=plan.training,
        **_result_columns(result),
    )


def _result_columns(result: RunResult | None) -> dict[str, Any]:
    """The columns that come from result.json; empty while the run goes on."""
    if result is None:
        return {}
    is_accuracy = result.history is not None and result.history.metric == "accuracy"
    return {
        "ended": result.ended,
        "samples_per_s": _cell(result.samples_per_s or None),
        "speedup": _cell(result.speedup),
        "equal": result.equal,
        "peak_memory_bytes": _cell(result.peak_memory_bytes),
        "loss": _cell(result.extra.get("loss")),
        "accuracy": _cell(result.history.score if is_accuracy and result.history else result.extra.get("accuracy")),
        "error": result.error,
    }


def _fabric_row(folder: Path, name: str) -> RunRow:
    """Describe a run of collectives on a network."""
    try:
        request = read_object(folder / _FABRIC)
        path = folder / "result.json"
        result = read_object(path) if path.is_file() else None
        workload, total = request["workload"], (result or {}).get("total", {})
        error = (result or {}).get("error")
        return RunRow(
            name=name,
            status="unfinished" if result is None else "failed" if error else "done",
            begun=str(request["begun"]),
            model=str(workload["name"]),
            strategy="fabric",
            workers=int(workload["num_ranks"]),
            p50_s=_cell(total.get("p50_s")),
            error=error if isinstance(error, str) else None,
        )
    except UsageError as problem:
        return RunRow(name=name, status="damaged", error=str(problem))
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError) as problem:
        return RunRow(name=name, status="damaged", error=f"{folder / _FABRIC} can't be read: {problem}")


def _cell(value: Any) -> Any:
    """Reduce a value to one cell: the largest of a sequence (one number for each worker), None for NaN."""
    if isinstance(value, list | tuple):
        return max((number for number in map(_cell, value) if number is not None), default=None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
        return None
    return value
