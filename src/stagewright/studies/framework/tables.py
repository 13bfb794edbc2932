"""Tables of a study: cells are text; columns of numbers are aligned to the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagewright.table import Column, Table

_NOTHING = ("", "–")
_WORDS = ("beaten", "disturbed", "not run")
"""What a column of numbers has where a number is not known."""


def study_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> Table:
    """Build a table with one note below it; a column without any value is left out."""
    kept = [index for index in range(len(columns)) if not rows or any(row[index] not in _NOTHING for row in rows)]
    columns, rows = [columns[index] for index in kept], [[row[index] for index in kept] for row in rows]
    numeric = [
        any(_is_number(row[index]) for row in rows)
        and all(_is_number(row[index]) or row[index] in (*_NOTHING, *_WORDS) for row in rows)
        for index in range(len(columns))
    ]
    return Table(
        title=title,
        columns=tuple(
            Column(name, "right" if right else "left", wrap=not right)
            for name, right in zip(columns, numeric, strict=True)
        ),
        rows=tuple(tuple(row) for row in rows),
        notes=(note,) if note else (),
    )


def _is_number(cell: str) -> bool:
    return cell.lstrip("±−+ ")[:1].isdigit()


def table_to_dict(table: Table) -> dict[str, Any]:
    """Write a table as `--json` prints it: one note instead of a list."""
    data = table.to_dict()
    return {**{name: data[name] for name in ("title", "columns", "rows")}, "note": " ".join(data["notes"])}
