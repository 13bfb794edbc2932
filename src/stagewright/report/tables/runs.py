"""Runs as a table, the newest first."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from stagewright.quantity import format_bytes
from stagewright.runs.index import RunRow

__all__ = ["runs_table"]

_STYLES = {
    "done": "green",
    "failed": "red",
    "damaged": "red",
    "refused": "yellow",
    "interrupted": "yellow",
    "unfinished": "yellow",
}


def runs_table(rows: Sequence[RunRow]) -> Table:
    """A row a run; columns that no run fills are left out."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("run", style="bold", no_wrap=True)  # says model and mesh, and is typed again: never broken
    table.add_column("status", no_wrap=True)
    table.add_column("batch", justify="right")
    columns = {
        "micro-\nbatches": [_number(row.microbatches) if row.strategy != "serial" else "" for row in rows],
        "schedule": [row.schedule or "" for row in rows],
        "samples\nper s": ["" if row.samples_per_s is None else f"{row.samples_per_s:.4g}" for row in rows],
        "speed-\nup": ["" if row.speedup is None else f"{row.speedup:.2f} ×" for row in rows],
        "equal": ["" if row.equal is None else "yes" if row.equal else "[red]no[/red]" for row in rows],
        "peak\nmemory": ["" if row.peak_memory_bytes is None else format_bytes(row.peak_memory_bytes) for row in rows],
        "p50 of\na trial": ["" if row.p50_s is None else f"{row.p50_s * 1e3:.3g} ms" for row in rows],
        "accuracy": ["" if row.accuracy is None else f"{row.accuracy:.1%}" for row in rows],
    }
    filled = {name: cells for name, cells in columns.items() if any(cells)}
    for name in filled:
        table.add_column(name, justify="left" if name in ("schedule", "equal") else "right")
    for at, row in enumerate(rows):
        table.add_row(
            escape(row.name),
            f"[{_STYLES[row.status]}]{row.status}[/]" if row.status in _STYLES else escape(row.status),
            _number(row.batch),
            *(cells[at] for cells in filled.values()),
        )
    return table


def _number(number: int | None) -> str:
    return "" if number is None else str(number)
