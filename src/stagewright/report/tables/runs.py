"""Runs and training results as tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stagewright.quantity import format_bytes
from stagewright.runs.index import RunRow
from stagewright.runs.result import TrainingHistory
from stagewright.table import Cell, Column, Table, Tone, number_columns

if TYPE_CHECKING:
    from stagewright.api.train import TrainingResult

_TONES: dict[str, Tone] = {
    "done": "good",
    "failed": "bad",
    "damaged": "bad",
    "refused": "warning",
    "interrupted": "warning",
    "unfinished": "warning",
}


def runs_table(rows: Sequence[RunRow]) -> Table:
    """Tabulate runs, newest first; columns that no run fills are left out."""
    parity: dict[bool | None, str | Cell] = {None: "", True: "ok", False: Cell("NO", "bad")}
    columns: dict[Column, list[str | Cell]] = {
        # The name contains model and mesh and is copied into commands, so it never wraps.
        Column("run"): [row.name for row in rows],
        Column("status"): [Cell(row.status, _TONES.get(row.status, "plain")) for row in rows],
        Column("batch", align="right"): [_format(row.batch, str) for row in rows],
        Column("micro-\nbatches", align="right"): [
            _format(row.microbatches if row.strategy != "serial" else None, str) for row in rows
        ],
        Column("schedule"): [row.schedule or "" for row in rows],
        Column("samples\nper s", align="right"): [_format(row.samples_per_s, "{:.4g}".format) for row in rows],
        Column("speed-\nup", align="right"): [_format(row.speedup, "{:.2f} ×".format) for row in rows],
        Column("parity"): [parity[row.equal] for row in rows],
        Column("peak\nmemory", align="right"): [_format(row.peak_memory_bytes, format_bytes) for row in rows],
        Column("trial\np50", align="right"): [
            _format(row.p50_s, lambda p50_s: f"{p50_s * 1e3:.3g} ms") for row in rows
        ],
        Column("accuracy", align="right"): [_format(row.accuracy, "{:.1%}".format) for row in rows],
    }
    filled = {column: cells for column, cells in columns.items() if any(map(str, cells)) or column.name == "run"}
    return Table(columns=tuple(filled), rows=tuple(zip(*filled.values(), strict=True)))


def training_result_table(result: TrainingResult) -> Table:
    """Tabulate the result of `stagewright.train`."""
    plan = result.plan
    title = f"{plan.model.name} on {result.task}: {plan.mesh.strategy}, batch {plan.batch}"
    return train_table(result.histories, title)


def summarize_training(histories: Sequence[TrainingHistory]) -> dict[str, float]:
    """Return mean and standard deviation over seeds of the metric after the last epoch."""
    scores = [history.score for history in histories]
    return {"mean": statistics.fmean(scores), "spread": statistics.stdev(scores) if len(scores) > 1 else 0.0}


def train_table(histories: Sequence[TrainingHistory], title: str) -> Table:
    """Tabulate every epoch of every seed."""
    metric = histories[0].metric
    summary = summarize_training(histories)
    over_seeds = f" ± {summary['spread']:.4f} over {len(histories)} seeds" if len(histories) > 1 else ""
    return Table(
        title=title,
        columns=number_columns("seed", "epoch", "training loss", "evaluation loss", metric, "samples/s"),
        rows=tuple(
            (
                str(history.seed),
                str(epoch.epoch),
                f"{epoch.training_loss:.4f}",
                f"{epoch.evaluation_loss:.4f}",
                f"{epoch.score:.4f}",
                f"{epoch.samples_per_s:.1f}",
            )
            for history in histories
            for epoch in history.epochs
        ),
        notes=(f"{metric} {summary['mean']:.4f}{over_seeds}",),
    )


def _format(value: float | None, write: Callable[[Any], str]) -> str:
    return "" if value is None else write(value)
