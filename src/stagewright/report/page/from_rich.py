"""The terminal's tables on the page: one place says what a table holds."""

from __future__ import annotations

from rich import table as rich_table
from rich.text import Text

from stagewright.report.page.sections import Table

__all__ = ["from_rich"]


def from_rich(table: rich_table.Table) -> Table:
    """The same cells without colours."""
    columns = [[_plain(cell) for cell in column.cells] for column in table.columns]
    right = frozenset(at for at, column in enumerate(table.columns) if column.justify == "right")
    return Table(
        title=_plain(table.title) if table.title is not None else "",
        head=tuple(_plain(column.header) for column in table.columns),
        rows=tuple(zip(*columns, strict=True)),
        right=right,
        note=_plain(table.caption) if table.caption is not None else "",
    )


def _plain(cell: object) -> str:
    text = cell if isinstance(cell, Text) else Text.from_markup(str(cell))
    return text.plain
