"""Strategies side by side, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from stagewright.quantity import format_bytes, format_s

__all__ = ["compare_table"]


def compare_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """One row a strategy; a plan that is not equal to serial, was refused or failed says so and has no speed-up."""
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("strategy", style="bold", no_wrap=True)
    for name in ("workers", "batch", "micro-batches"):
        table.add_column(name, justify="right")
    table.add_column("schedule")
    for name in ("samples/s", "latency", "speed-up", "of bound", "peak memory", "sent a step"):
        table.add_column(name, justify="right")
    table.add_column("equal to serial")
    for row in rows:
        head = [escape(row["strategy"]), str(row["workers"]), str(row["batch"]), str(row["microbatches"])]
        head.append(row["schedule"] or "–")
        if "error" in row:
            word = "refused" if row["refused"] else "failed"
            first = str(row["error"]).splitlines()[0]
            table.add_row(*head, *["–"] * 6, f"[red]{word}[/red]: {escape(first)}")
            continue
        speedup = row["speedup"]
        share = row["share_of_bound"]
        sent = sum(row["link_bytes"].values())
        table.add_row(
            *head,
            f"{row['samples_per_s']:.1f} ±{row['samples_per_s_spread'] / 2:.1f}",
            format_s(row["latency_s"]),
            "–" if speedup is None else f"{speedup:.2f} ×",
            "–" if share is None else f"{share:.0%}",
            ", ".join(format_bytes(size) for size in row["peak_memory_bytes"]),
            format_bytes(sent) if sent else "–",
            _verdict(row),
        )
    return table


def _verdict(row: Mapping[str, Any]) -> str:
    equality = row["equality"]
    worst = max(equality["loss"], equality["gradients"], equality["outputs"], equality["buffers"])
    if row["equal"]:
        return "[green]yes[/green], to the last bit" if worst == 0 else f"[green]yes[/green], within {worst:.0e}"
    return f"[red]NO[/red]: {escape(equality['worst'])} is off by {worst:.0e} (allowed {equality['tolerance']:.0e})"
