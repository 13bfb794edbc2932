"""A table as a value: what it says, not how it is drawn.

    Table(title="Runs", columns=(Column("model"), Column("samples/s", align="right")), rows=(("gpt2", "12.5"),))

Analysis returns tables; `stagewright.report` draws them in the terminal, as HTML and as Markdown. ``str(table)`` is
plain text and a notebook shows HTML, so that a value is readable wherever it is printed.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any, Literal, TypeAlias

Tone: TypeAlias = Literal["plain", "strong", "good", "warning", "bad", "faint"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell with emphasis; a plain string is a cell without."""

    text: str
    tone: Tone = "plain"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Column:
    """A heading and how the cells below it are aligned."""

    name: str
    """The heading; a newline marks where the terminal breaks it."""
    align: Literal["left", "right"] = "left"
    wrap: bool = False
    """Whether a narrow terminal may break its cells over several lines."""

    @property
    def label(self) -> str:
        """The heading on one line."""
        return self.name.replace("-\n", "-").replace("\n", " ")


def text_columns(*names: str, wrap: bool = False) -> tuple[Column, ...]:
    """Return left-aligned columns."""
    return tuple(Column(name, wrap=wrap) for name in names)


def number_columns(*names: str) -> tuple[Column, ...]:
    """Return right-aligned columns."""
    return tuple(Column(name, align="right") for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Headings and rows of cells."""

    title: str = ""
    columns: tuple[Column, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    notes: tuple[str, ...] = ()
    """Sentences below the table."""

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), f"{len(row)} cells in a row of {len(self.columns)} columns: {row}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "title": self.title,
            "columns": [column.label for column in self.columns],
            "rows": [[str(cell) for cell in row] for row in self.rows],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        cells = [[column.label for column in self.columns], *([str(cell) for cell in row] for row in self.rows)]
        widths = [max(len(row[index]) for row in cells) for index in range(len(self.columns))]
        lines = ["  ".join(map(_pad, row, widths, self.columns)).rstrip() for row in cells]
        lines.insert(1, "  ".join("─" * width for width in widths))
        return "\n".join([*([self.title] if self.title else []), *lines, *self.notes])

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        head = "".join(f"<th>{escape(column.label)}</th>" for column in self.columns)
        body = "".join(
            "<tr>"
            + "".join(
                f'<td style="text-align:{column.align}">{escape(str(cell))}</td>'
                for cell, column in zip(row, self.columns, strict=True)
            )
            + "</tr>"
            for row in self.rows
        )
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"


def _pad(text: str, width: int, column: Column) -> str:
    return text.rjust(width) if column.align == "right" else text.ljust(width)
