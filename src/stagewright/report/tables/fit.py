"""The largest size that fits in memory under each strategy, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stagewright.planner.fit import MEMORY, StrategyFit
from stagewright.quantity import format_bytes
from stagewright.table import Cell, Table, number_columns, text_columns

if TYPE_CHECKING:
    from stagewright.api.fit import FitResult


def fit_result_table(result: FitResult) -> Table:
    """Tabulate the result of `stagewright.fit`."""
    memory = format_bytes(result.memory_bytes)
    title = f"{result.model}: largest {result.what} on {result.devices} devices of {memory}, forecast"
    return fit_table(result.rows, title, result.what)


def fit_table(rows: Sequence[StrategyFit], title: str, what: str) -> Table:
    """Tabulate one strategy per row; the largest and the one with the least memory are named."""
    possible = [row for row in rows if not row.refused]
    now = f"memory at {possible[0].now}" if possible else "memory now"
    largest = max((row.largest for row in possible), default=0)
    least = min((row.now_bytes for row in possible if not row.by_unit), default=0)
    cells = []
    for row in rows:
        recompute = "by unit" if row.by_unit else "yes" if row.recompute else "no"
        head: tuple[str | Cell, ...] = (row.strategy.replace("sharded", "FSDP"), recompute)
        if row.refused:
            cells.append((*head, "–", "–", "–", "–", Cell("refused", "warning")))
            continue
        remarks = [
            *(["largest"] if row.largest == largest and largest else []),
            *(["least memory"] if row.now_bytes == least and not row.by_unit else []),
            *([f"{len(row.recomputed_units)} units recomputed"] if row.by_unit and row.largest else []),
            *(["not limited by memory"] if row.bound != MEMORY else []),
        ]
        cells.append(
            (
                *head,
                str(row.largest) if row.largest else "none",
                format_bytes(row.peak_bytes) if row.largest else "–",
                format_bytes(row.above_bytes) if row.above_bytes else "–",
                format_bytes(row.now_bytes),
                ", ".join(remarks),
            )
        )
    return Table(
        title=title,
        columns=(
            *text_columns("strategy", "recompute"),
            *number_columns(f"max {what}", "memory at max", "memory at max + 1", now),
            *text_columns("", wrap=True),
        ),
        rows=tuple(cells),
    )
