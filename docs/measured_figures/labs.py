"""Blocks of the lab pages: how long their commands take."""

from __future__ import annotations

from measured_figures.markdown import Record, load_record, paragraph, source, table


def lab_times() -> str:
    """List each command of the lab pages with its time under --quick."""
    record = load_record("lab_times")
    rows: list[Record] = [row for row in record["rows"] if row["seconds"] is not None]
    loads = [row["other_load"] for row in rows if row.get("other_load") is not None]
    busy = max(loads, default=0.0)
    note = (
        f" Other programs took up to {100 * busy:.0f} % of the cores' time, so these are upper limits."
        if busy > 0.1
        else ""
    )
    lines = [[f"`{row['words']}`", _minutes(row["seconds"])] for row in rows]
    return (
        source("lab_times")
        + "\n"
        + paragraph(f"The commands of the lab pages with `--quick`.{note} In full size see each page.")
        + "\n"
        + table(["command", "time"], lines, right=True)
    )


def _minutes(seconds: float) -> str:
    """Write 95 s as 1 min 35 s."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
