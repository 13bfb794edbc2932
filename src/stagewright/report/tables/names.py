"""A plain list of names with a line each."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.markup import escape
from rich.table import Table

__all__ = ["name_table"]


def name_table(kind: str, described: Mapping[str, str]) -> Table:
    """Two columns: the name, and what it is."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(kind, style="bold", no_wrap=True)
    table.add_column("what it is")
    for name, line in described.items():
        table.add_row(escape(name), escape(line))
    return table
