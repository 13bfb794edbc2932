"""How large each strategy can be, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from stagewright.planner.fit import MEMORY, Fit
from stagewright.quantity import format_bytes

__all__ = ["fit_table"]


def fit_table(rows: Sequence[Fit], title: str, what: str) -> Table:
    """A row a strategy; the largest and the one that uses least memory stand out."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("strategy", style="bold", no_wrap=True)
    table.add_column("recompute")
    possible = [row for row in rows if not row.refused]
    now = f"memory at {possible[0].now}" if possible else "memory now"
    for name in (f"most {what}", "memory there", "one more", now):
        table.add_column(name, justify="right")
    table.add_column("")
    largest = max((row.largest for row in possible), default=0)
    least = min((row.now_bytes for row in possible), default=0)
    for row in rows:
        if row.refused:
            table.add_row(row.strategy, "yes" if row.recompute else "no", "–", "–", "–", "–", "[red]refused[/red]")
            continue
        remarks = [
            *(["the largest"] if row.largest == largest and largest else []),
            *(["least memory"] if row.now_bytes == least else []),
            *(["not bound by memory"] if row.bound != MEMORY else []),
        ]
        table.add_row(
            row.strategy,
            "yes" if row.recompute else "no",
            str(row.largest) if row.largest else "none",
            format_bytes(row.peak_bytes) if row.largest else "–",
            format_bytes(row.above_bytes) if row.above_bytes else "–",
            format_bytes(row.now_bytes),
            ", ".join(remarks),
        )
    return table
