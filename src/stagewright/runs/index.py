"""The index over runs: one SQLite file beside the run folders, for lists and comparisons.

It holds nothing that the folders do not, so it may be deleted at any time: a file that is damaged or of another version
is built again, in memory where the disk refuses. A run is read again when its plan or its result has changed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stagewright.errors import UsageError
from stagewright.runs.result import RunResult
from stagewright.runs.run_folder import RunFolder

__all__ = ["INDEX_NAME", "RunIndex", "RunRow"]

INDEX_NAME = ".stagewright-runs.sqlite"
_VERSION = 2  # of the table below; another one means: build it again
# The file is right, but can't be written, or another process holds it.
_NOT_OURS = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_FULL")
_PLAN, _FABRIC = "plan.toml", "fabric.json"  # which of them a run folder has says what was run
_DEPTH = 3  # how deep below the root runs may lie


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run in a list; what it has not (yet) is None."""

    name: str
    """The folder, relative to the root."""
    status: str
    """done, failed, refused (what was asked for can't be), interrupted, unfinished (goes on, or was killed) or damaged.
    """
    begun: str | None = None
    """When it began, in ISO 8601."""
    ended: str | None = None
    """When it ended."""
    model: str | None = None
    """The model's name."""
    strategy: str | None = None
    """serial, data, tensor, pipeline, or several with ×; fabric: collectives alone."""
    mesh: str | None = None
    """How many along each axis: "data=2,pipeline=2"."""
    workers: int | None = None
    """Workers in all."""
    batch: int | None = None
    """Samples in a step."""
    microbatches: int | None = None
    """Micro-batches in a step of a replica."""
    schedule: str | None = None
    """The schedule."""
    training: bool | None = None
    """Forward and backward, or forward alone."""
    samples_per_s: float | None = None
    """The median over steps."""
    speedup: float | None = None
    """Over serial."""
    equal: bool | None = None
    """Whether it equals serial."""
    peak_memory_bytes: int | None = None
    """Of the worker that needs most."""
    loss: float | None = None
    """The last loss."""
    accuracy: float | None = None
    """On the task's test samples."""
    p50_s: float | None = None
    """Of a trial of a fabric run: half of them took less."""
    error: str | None = None
    """Why it failed or can't be read, in one sentence."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class RunIndex:
    """The runs below one root; brought up to date when it is opened."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._database = self._open()

    def rows(self) -> list[RunRow]:
        """All runs, the newest first."""
        found = self._database.execute("SELECT row FROM runs ORDER BY begun DESC, name DESC").fetchall()
        return [RunRow(**json.loads(row)) for (row,) in found]

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    def __enter__(self) -> RunIndex:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self) -> sqlite3.Connection:
        if not self.root.is_dir():
            return self._ready(":memory:")
        path = self.root / INDEX_NAME
        for _ in range(2):
            try:
                return self._ready(str(path))
            except (sqlite3.DatabaseError, ValueError, TypeError) as error:
                if getattr(error, "sqlite_errorname", "").startswith(_NOT_OURS):
                    break
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        return self._ready(":memory:")

    def _ready(self, place: str) -> sqlite3.Connection:
        """A connection to an index that is as the folders are."""
        database = sqlite3.connect(place, timeout=5.0)
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
                for (row,) in database.execute("SELECT row FROM runs"):
                    RunRow(**json.loads(row))
        except BaseException:
            database.close()
            raise
        return database

    def _refresh(self, database: sqlite3.Connection) -> None:
        stored = dict(database.execute("SELECT name, stamp FROM runs").fetchall())
        seen = set()
        for folder in _run_folders(self.root, _DEPTH):
            name, stamp = folder.relative_to(self.root).as_posix(), _stamp(folder)
            seen.add(name)
            if stored.get(name) != stamp:
                row = _describe(RunFolder(folder), name) if (folder / _PLAN).is_file() else _fabric(folder, name)
                database.execute(
                    "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        name,
                        stamp,
                        row.begun or "",
                        row.model,
                        row.strategy,
                        row.status,
                        row.samples_per_s,
                        json.dumps(row.to_dict()),
                    ),
                )
        database.executemany("DELETE FROM runs WHERE name = ?", [(name,) for name in stored if name not in seen])


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Every folder of a run; hidden ones are runs that are being created."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            if entry.name.startswith(".") or not entry.is_dir():
                continue
            path = folder / entry.name
            if (path / _PLAN).is_file() or (path / _FABRIC).is_file():
                yield path
            if depth > 1 and not (path / "workers").is_dir():
                yield from _run_folders(path, depth - 1)


def _stamp(folder: Path) -> str:
    """Changes when the plan or the result does."""
    parts = []
    for name in (_PLAN, _FABRIC, "environment.json", "result.json"):
        try:
            state = (folder / name).stat()
            parts.append(f"{state.st_mtime_ns}:{state.st_size}:{state.st_ino}")
        except OSError:
            parts.append("none")
    return " ".join(parts)


def _describe(folder: RunFolder, name: str) -> RunRow:
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


def _fabric(folder: Path, name: str) -> RunRow:
    """Collectives on a network: what was sent, and how long a trial took."""
    try:
        asked = json.loads((folder / _FABRIC).read_text(encoding="utf-8"))
        path = folder / "result.json"
        result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        workload, total = asked["workload"], (result or {}).get("total", {})
        error = (result or {}).get("error")
        return RunRow(
            name=name,
            status="unfinished" if result is None else "failed" if error else "done",
            begun=str(asked["begun"]),
            model=str(workload["name"]),
            strategy="fabric",
            workers=int(workload["num_ranks"]),
            p50_s=_cell(total.get("p50_s")),
            error=error if isinstance(error, str) else None,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        return RunRow(name=name, status="damaged", error=f"{folder / _FABRIC} can't be read: {problem}")


def _cell(value: Any) -> Any:
    """Reduce a value to one cell: the largest of a sequence (one number for each worker), None for NaN."""
    if isinstance(value, list | tuple):
        numbers = [number for number in value if isinstance(number, int | float)]
        return max(numbers) if numbers else None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float) else None
