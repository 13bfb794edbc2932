"""Tables and text as Markdown."""

from __future__ import annotations

import re

from stagewright.table import Cell, Table

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~])")


def escape_markdown(text: str) -> str:
    """Escape text so that Markdown shows it unchanged, on one line."""
    return _SPECIAL.sub(r"\\\1", one_line(text)).replace("&", "&amp;")


def one_line(text: str) -> str:
    """Replace control characters, also line breaks, and lone surrogates."""
    plain = "".join(character if character >= " " else " " for character in text)
    return plain.encode("utf-8", "replace").decode("utf-8")


def table_markdown(table: Table) -> str:
    """Render title, table and notes; strong cells are bold."""
    rule = "".join(" ---: |" if column.align == "right" else " --- |" for column in table.columns)
    lines = ["| " + " | ".join(escape_markdown(column.label) for column in table.columns) + " |", "|" + rule]
    lines += ["| " + " | ".join(map(_format_cell, row)) + " |" for row in table.rows]
    title = f"\n**{escape_markdown(table.title)}**\n" if table.title else ""
    notes = "".join(f"\n{escape_markdown(note)}\n" for note in table.notes)
    return title + "\n" + "\n".join(lines) + "\n" + notes


def _format_cell(cell: str | Cell) -> str:
    text = escape_markdown(str(cell))
    return f"**{text}**" if text and isinstance(cell, Cell) and cell.tone == "strong" else text
