"""A study's tables and answers on the screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

__all__ = ["study_table"]


def study_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> Table:
    """One of a study's tables; columns of numbers stand at the right."""
    table = Table(
        title=escape(title),
        caption=escape(note) or None,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title_justify="left",
        caption_justify="left",
    )
    for at, name in enumerate(columns):
        numeric = bool(rows) and all(row[at][:1].isdigit() or row[at] in ("", "–") for row in rows)
        table.add_column(escape(name), justify="right" if numeric else "left", style="bold" if at == 0 else None)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
