"""What one worker writes: metrics line by line while it runs, events in one file when it ends.

Each line is handed to the system at once, so a worker that is killed leaves every step and at most half a line, which
readers leave out. Events are many and small, so they are Parquet; where pyarrow is missing, JSON lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from stagewright.errors import RunError

__all__ = ["WorkerFolder"]


@dataclass(slots=True)
class WorkerFolder:
    """The files of one worker; a context manager that closes them."""

    # Where they are: `workers/3` in the run folder.
    path: Path
    # The open metrics file.
    _metrics: IO[str] | None = field(default=None, repr=False)

    def append_metrics(self, **values: Any) -> None:
        """Adds a line to metrics.jsonl and flushes it."""
        line = json.dumps(values, ensure_ascii=False)
        assert "\n" not in line
        try:
            if self._metrics is None:
                self.path.mkdir(parents=True, exist_ok=True)
                self._metrics = open(self._metrics_path, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)
                if _ends_in_half_a_line(self._metrics_path):
                    self._metrics.write("\n")
            self._metrics.write(line + "\n")
            self._metrics.flush()
        except OSError as error:
            raise RunError(f"can't write {self._metrics_path}: {error.strerror}") from error

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl that are whole."""
        try:
            file = open(self._metrics_path, "rb")  # noqa: SIM115 (closed below)
        except FileNotFoundError:
            return
        with file:
            for line in file:
                try:
                    values = json.loads(line)
                except ValueError:
                    continue  # the writer was killed while writing it, or is writing it now
                if isinstance(values, dict):
                    yield values

    def write_events(self, events: Iterable[Mapping[str, Any]]) -> Path:
        """Writes all events, one row each; a column that an event lacks is empty."""
        rows = [dict(event) for event in events]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                import pyarrow
                from pyarrow import parquet
            except ModuleNotFoundError:
                path = self.path / "events.jsonl"
                path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
                return path
            path = self.path / "events.parquet"
            table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
            temporary = self.path / ".events.parquet.tmp"
            parquet.write_table(table, temporary, compression="zstd")
            temporary.replace(path)
            return path
        except OSError as error:
            raise RunError(f"can't write events to {self.path}: {error.strerror or error}") from error

    def events(self) -> list[dict[str, Any]]:
        """All events, each as a row; none where the worker has not ended."""
        path = self.path / "events.parquet"
        if path.is_file():
            from pyarrow import parquet

            rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
            return rows
        lines = self.path / "events.jsonl"
        return [json.loads(line) for line in lines.read_text("utf-8").splitlines()] if lines.is_file() else []

    def close(self) -> None:
        """Closes the metrics file."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    @property
    def _metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def __enter__(self) -> WorkerFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _ends_in_half_a_line(path: Path) -> bool:
    """Whether a worker before this one was killed while writing."""
    with open(path, "rb") as file:
        file.seek(0, 2)
        if file.tell() == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"
