"""Tables for the terminal, drawn with rich."""

from __future__ import annotations

from rich import box, table as rich_table
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.text import Text

from stagewright.display import printable
from stagewright.table import Cell, Column, Table, Tone

_STYLES: dict[Tone, str] = {
    "plain": "",
    "strong": "bold",
    "good": "green",
    "warning": "yellow",
    "bad": "red",
    "faint": "dim",
}


def draw_table(table: Table) -> RenderableType:
    """Draw the title, the table and its notes; the first text column names the rows and is bold."""
    grid = rich_table.Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        show_header=any(column.name for column in table.columns),
    )
    named = next((index for index, column in enumerate(table.columns) if column.align == "left"), None)
    for index, column in enumerate(table.columns):
        cells = [row[index] for row in table.rows]
        grid.add_column(
            Text(column.name),
            justify=column.align,
            style="bold" if index == named else "",
            min_width=None if column.wrap else max((cell_len(printable(str(cell))) for cell in cells), default=0),
            overflow="fold",
        )
    for row in table.rows:
        grid.add_row(*(_draw_cell(cell, column) for cell, column in zip(row, table.columns, strict=True)))
    title = [Text(printable(table.title), style="table.title")] if table.title else []
    notes = [Text(printable(note), style="table.caption", justify="left") for note in table.notes]
    return Group(*title, grid, *notes)


def min_table_width(table: Table, console: Console) -> int:
    """Return the width below which a cell that must not wrap would be cut."""
    return console.measure(draw_table(table), options=console.options.update_width(100_000)).minimum


def _draw_cell(cell: str | Cell, column: Column) -> Text:
    style = _STYLES[cell.tone] if isinstance(cell, Cell) else ""
    return Text(printable(str(cell)), style=style, no_wrap=not column.wrap)
