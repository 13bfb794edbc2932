"""The files of one worker: metrics line by line while it runs, events and memory when it ends.

Each line is flushed at once, so a killed worker leaves every step and at most one incomplete line, which readers
ignore. Events are stored as Parquet; as JSON lines where pyarrow is missing or the run has failed and there is little
time. A killed worker leaves its journal (``journal.py``).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from stagewright.errors import RunError, UsageError
from stagewright.extras import require
from stagewright.files.atomic import save_text
from stagewright.files.json_values import parse_json
from stagewright.runs.journal import read_journal, remove_journal, rows_of

UNFINISHED = "unfinished"
"""Note of a step that a fault interrupted, and of its last event."""

MAX_LINE_BYTES = 2**20
"""Length of a line of metrics or events above which it is not one of ours."""

MAX_ROWS, MAX_COLUMNS = 4_000_000, 64
"""Size above which a file of events or memory is refused."""

_TYPES = {"stage": "int64", "microbatch": "int64", "bytes": "int64", "peer": "int64", "note": "string"}


@dataclass(slots=True)
class WorkerFolder:
    """The folder of one worker; a context manager that closes its files."""

    path: Path
    """`workers/3` in the run folder."""
    _metrics: IO[str] | None = field(default=None, repr=False)

    def append_metrics(self, **values: Any) -> None:
        """Append a line to metrics.jsonl and flush it."""
        line = json.dumps(values, ensure_ascii=False)
        assert "\n" not in line
        try:
            if self._metrics is None:
                self.path.mkdir(parents=True, exist_ok=True)
                self._metrics = open(self._metrics_path, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)
                if _ends_in_incomplete_line(self._metrics_path):
                    self._metrics.write("\n")
            self._metrics.write(line + "\n")
            self._metrics.flush()
        except OSError as error:
            raise RunError(f"can't write {self._metrics_path}: {error.strerror}") from error

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Read the complete lines of metrics.jsonl."""
        try:
            file = open(self._metrics_path, "rb")  # noqa: SIM115 (closed below)
        except FileNotFoundError:
            return
        with file:
            while line := file.readline(MAX_LINE_BYTES):
                try:
                    values = parse_json(line)
                except ValueError:
                    continue  # incomplete: the writer was killed, or is still writing; or longer than any line of ours
                if isinstance(values, dict):
                    yield values

    def write_events(self, events: Iterable[Mapping[str, Any]], *, quickly: bool = False) -> Path:
        """Write all events, one row each; missing columns are empty.

        ``quickly`` writes JSON lines, for a worker that is being ended: importing pyarrow may take a second.
        """
        if not quickly:
            path = self._write_rows("events", events)
            remove_journal(self.path)
            return path
        path = self.path / "events.jsonl"
        save_text("".join(json.dumps(dict(row)) + "\n" for row in events), path)
        (self.path / "events.parquet").unlink(missing_ok=True)  # of an earlier run in this folder
        return path

    def events(self) -> list[dict[str, Any]]:
        """Read all events as rows; of a killed or running worker, those of complete steps."""
        return self._rows("events") if self._has_events else _journal_rows(self.path)

    def finalize_events(self) -> None:
        """Write the events of a killed worker from its journal, and remove the journal."""
        rows = [] if self._has_events else _journal_rows(self.path)
        if rows:
            self.write_events(rows)
        remove_journal(self.path)

    def write_memory(self, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Write the memory of one step over time."""
        return self._write_rows("memory", rows)

    def memory(self) -> list[dict[str, Any]]:
        """Read the memory over time; empty where it was not recorded."""
        return self._rows("memory")

    def _write_rows(self, name: str, content: Iterable[Mapping[str, Any]]) -> Path:
        rows = [dict(row) for row in content]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                import pyarrow
                from pyarrow import parquet
            except ImportError:  # missing or broken
                path = self.path / f"{name}.jsonl"
                path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
                return path
            path = self.path / f"{name}.parquet"
            # A column may be empty in all rows of one worker: use its type explicitly.
            table = pyarrow.table(
                {
                    column: pyarrow.array([row.get(column) for row in rows], type=_TYPES.get(column))
                    for column in columns
                }
            )
            temporary = self.path / f".{name}.parquet.tmp"
            parquet.write_table(table, temporary, compression="zstd")
            temporary.replace(path)
            return path
        except OSError as error:
            raise RunError(f"can't write {name} to {self.path}: {error.strerror or error}") from error

    def _rows(self, name: str) -> list[dict[str, Any]]:
        path = self.path / f"{name}.parquet"
        if path.is_file():
            require("pyarrow", f"reading {path}")
            return _read_parquet(path)
        path = self.path / f"{name}.jsonl"
        return list(_read_lines(path)) if path.is_file() else []

    def close(self) -> None:
        if self._metrics is not None:
            metrics, self._metrics = self._metrics, None
            try:
                metrics.close()
            except OSError as error:  # the disk is full
                raise RunError(f"can't write {self._metrics_path}: {error.strerror}") from error

    @property
    def _has_events(self) -> bool:
        return any((self.path / f"events.{ending}").is_file() for ending in ("parquet", "jsonl"))

    @property
    def _metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def __enter__(self) -> WorkerFolder:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        with contextlib.suppress(RunError) if error is not None else contextlib.nullcontext():
            self.close()


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, thrift_string_size_limit=2**24, thrift_container_size_limit=2**20) as file:
            if file.metadata.num_rows > MAX_ROWS or file.metadata.num_columns > MAX_COLUMNS:
                raise ValueError(
                    f"{file.metadata.num_rows} rows of {file.metadata.num_columns} columns, but at most {MAX_ROWS} of "
                    f"{MAX_COLUMNS} are read"
                )
            rows: list[dict[str, Any]] = file.read(use_threads=False).to_pylist()
            return rows
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{path} is damaged: {reason or type(error).__name__}") from None


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            while line := file.readline(MAX_LINE_BYTES):
                row = parse_json(line)
                if not isinstance(row, dict):
                    raise ValueError("a line is not a JSON object")
                yield row
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {error}") from None


def _journal_rows(folder: Path) -> list[dict[str, Any]]:
    return [row for step in read_journal(folder) for row in rows_of(step)]


def _ends_in_incomplete_line(path: Path) -> bool:
    """Whether a previous worker was killed while writing."""
    with open(path, "rb") as file:
        file.seek(0, 2)
        if file.tell() == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"
