"""Raw trials: one row per trial, message and rank; all results are computed from them.

    trial  message  rank  start_s  duration_s  late_s  retransmits  wrong  receive_wait_s[n]  send_wait_s[n]

A rank's duration lasts from leaving the barrier (after the gap) to its own end. A trial's duration is the longest of
its ranks, so no common clock is needed. Rows are sent as bytes of a numpy array and stored as Parquet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stagewright.errors import RunError, UsageError
from stagewright.extras import require


def row_type(num_ranks: int) -> np.dtype[Any]:
    """Return the dtype of a rank's row."""
    return np.dtype(
        [
            ("trial", "<u4"),
            ("message", "<u2"),
            ("wrong", "u1"),
            ("took_part", "u1"),
            ("retransmits", "<u4"),
            ("start_s", "<f8"),
            ("duration_s", "<f8"),
            ("late_s", "<f4"),
            ("receive_wait_s", "<f4", (num_ranks,)),
            ("send_wait_s", "<f4", (num_ranks,)),
        ]
    )


def step_type() -> np.dtype[Any]:
    """Return the dtype of a step: when it was sent and received, relative to the rank's start."""
    return np.dtype([("trial", "<u4"), ("message", "<u2"), ("step", "<u2"), ("sent_s", "<f4"), ("received_s", "<f4")])


@dataclass(frozen=True, slots=True)
class TrialTable:
    """Trials that all ranks finished."""

    rows: npt.NDArray[Any]
    """rows[trial, message, rank], of `row_type`."""
    void: npt.NDArray[np.bool_]
    """Per trial: whether it is discarded because the lab's switch was late."""

    @classmethod
    def join(cls, blocks: Sequence[npt.NDArray[Any]], num_messages: int) -> TrialTable:
        """Join the rows of all ranks; omit trials that a rank did not finish."""
        num_ranks = len(blocks)
        num_trials = min((len(block) // num_messages for block in blocks), default=0)
        rows = np.zeros((num_trials, num_messages, num_ranks), dtype=row_type(num_ranks))
        for rank, block in enumerate(blocks):
            rows[:, :, rank] = block[: num_trials * num_messages].reshape(num_trials, num_messages)
        return cls(rows, np.zeros(num_trials, dtype=np.bool_))

    @property
    def num_trials(self) -> int:
        return int(self.rows.shape[0])

    @property
    def num_messages(self) -> int:
        return int(self.rows.shape[1])

    @property
    def num_ranks(self) -> int:
        return int(self.rows.shape[2])

    def durations(self, message: int) -> npt.NDArray[np.float64]:
        """Return the duration of each valid trial: that of its slowest rank."""
        rows = self.rows[~self.void, message]
        durations: npt.NDArray[np.float64] = np.where(rows["took_part"] > 0, rows["duration_s"], 0.0)
        slowest: npt.NDArray[np.float64] = durations.max(axis=1)
        return slowest

    def totals(self) -> npt.NDArray[np.float64]:
        """Return the summed duration of all messages of each valid trial."""
        if not self.num_messages:
            return np.zeros(0)
        total: npt.NDArray[np.float64] = np.sum(
            [self.durations(message) for message in range(self.num_messages)], axis=0
        )
        return total

    @property
    def num_wrong(self) -> int:
        """Number of buffers with wrong contents."""
        return int(self.rows["wrong"].sum())


def write_trials(table: TrialTable, names: Sequence[str], sizes: Sequence[int], path: Path) -> None:
    """Write Parquet with a row per trial, message and rank, atomically."""
    import pyarrow
    from pyarrow import parquet

    _, messages, ranks = table.rows.shape
    flat = table.rows.reshape(-1)
    index = np.arange(len(flat))
    message = index // ranks % messages
    columns = {
        "trial": flat["trial"],
        "message": flat["message"],
        "name": pyarrow.DictionaryArray.from_arrays(
            message.astype(np.int32), pyarrow.array(list(names), pyarrow.string())
        ),
        "bytes": np.asarray(sizes, dtype=np.int64)[message] if messages else np.zeros(0, dtype=np.int64),
        "rank": (index % ranks if ranks else index).astype(np.int32),
        "took_part": flat["took_part"].astype(np.bool_),
        "start_s": flat["start_s"],
        "duration_s": flat["duration_s"],
        "late_s": flat["late_s"],
        "retransmits": flat["retransmits"],
        "wrong": flat["wrong"].astype(np.bool_),
        "void": np.repeat(table.void, messages * ranks),
        "receive_wait_s": _lists(flat["receive_wait_s"]),
        "send_wait_s": _lists(flat["send_wait_s"]),
    }
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        parquet.write_table(pyarrow.table(columns), temporary, compression="zstd")
        temporary.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from None


def _lists(values: npt.NDArray[np.float32]) -> Any:
    import pyarrow

    width = values.shape[1]
    return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(np.ascontiguousarray(values).reshape(-1)), width)


def read_trials(path: Path) -> TrialTable:
    """Read the trials of a finished run."""
    require("pyarrow")
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: did the run end before its first trial?") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    if table.num_rows == 0:
        return TrialTable(np.zeros((0, 0, 0), dtype=row_type(0)), np.zeros(0, dtype=np.bool_))
    num_ranks = int(np.max(table["rank"].to_numpy())) + 1
    num_messages = int(np.max(table["message"].to_numpy())) + 1
    flat = np.zeros(table.num_rows, dtype=row_type(num_ranks))
    for name in ("trial", "message", "took_part", "start_s", "duration_s", "late_s", "retransmits", "wrong"):
        flat[name] = table[name].to_numpy()
    for name in ("receive_wait_s", "send_wait_s"):
        flat[name] = table[name].combine_chunks().flatten().to_numpy().reshape(-1, num_ranks)
    void = table["void"].to_numpy().astype(np.bool_).reshape(-1, num_messages * num_ranks)[:, 0]
    return TrialTable(flat.reshape(-1, num_messages, num_ranks), void)
