"""What a page is made of, as plain values; whoever has something to show hands over sections.

    Page
      Section "Speed"       prose in whole sentences, then items in order:
        Table               cells as text; a row may be marked
        BarChart            ── label ──────────── 123/s      one row a bar, its text at the right
                            ██████████▌     │                │ where the ideal is
        LineChart           curves, steps or dots over a number
        Timeline            every worker's events, which can be zoomed
        Code, Prose         text that can be copied; a question with its answer
        Picture             a figure that someone else has drawn
        Fold                items behind a line that opens

All text is plain: HTML and Markdown escape it. Colours are names of `report.palette`, so that they follow light and
dark. To show something of one's own: `build_report(paths, extra=[Section(…)])`, then `page_html(report.page)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

__all__ = [
    "Bar",
    "BarChart",
    "BarPart",
    "Code",
    "Fold",
    "Item",
    "Line",
    "LineChart",
    "Page",
    "Picture",
    "Prose",
    "Quantity",
    "Section",
    "Table",
    "Timeline",
    "folded",
]

# What an axis counts: how its ticks are written.
Quantity: TypeAlias = Literal["number", "count", "seconds", "bytes", "times", "share"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells as text."""

    # Above it; empty: nothing.
    title: str = ""
    # The columns' names.
    head: tuple[str, ...]
    # The cells, row by row.
    rows: tuple[tuple[str, ...], ...]
    # Columns whose cells stand at the right, by place.
    right: frozenset[int] = frozenset()
    # Rows that are to be seen first, by place: plans differ there.
    marked: frozenset[int] = frozenset()
    # Below it; empty: nothing.
    note: str = ""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.head) for row in self.rows), self.title


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPart:
    """One piece of a bar."""

    # What it is; in the legend where a chart has several names.
    name: str
    # Its colour's name.
    paint: str
    # From where to where.
    start: float
    end: float
    # What is shown beside the pointer.
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row of a bar chart."""

    # At its left.
    label: str
    # The pieces.
    parts: tuple[BarPart, ...]
    # At its right.
    text: str = ""
    # Where the ideal is; None: there is none.
    mark: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """Bars from a common origin."""

    # Names its files.
    name: str
    # Says what is shown, with the unit.
    title: str
    # Of the axis.
    quantity: Quantity
    # The rows.
    bars: tuple[Bar, ...]
    # What a mark means.
    mark_name: str = ""
    # Whether a table of the page has the same numbers: Markdown leaves it out.
    in_table: bool = False
    # Below it; empty: nothing.
    note: str = ""

    @property
    def legend(self) -> tuple[tuple[str, str], ...]:
        """Names with their colours, in order; empty where they say nothing."""
        pairs = dict.fromkeys((part.name, part.paint) for bar in self.bars for part in bar.parts if part.name)
        return tuple(pairs) if len({name for name, _ in pairs}) > 1 else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve."""

    # In the legend.
    name: str
    # Its colour's name.
    paint: str
    # The points.
    x: tuple[float, ...]
    y: tuple[float, ...]
    # How points are joined: by a line, held until the next one, or not.
    style: Literal["line", "step", "dots"] = "line"
    # Whether the line is broken, for those who can't tell colours.
    dashed: bool = False

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.y), self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Curves over a number."""

    # Names its files.
    name: str
    # Says what is shown.
    title: str
    # Names of the axes, with units where a quantity has none.
    x_title: str
    y_title: str
    # The curves.
    lines: tuple[Line, ...]
    # Of the axes.
    x_quantity: Quantity = "number"
    y_quantity: Quantity = "number"
    # Logarithmic axes.
    x_log: bool = False
    y_log: bool = False
    # Whether 0 is on the vertical axis.
    from_zero: bool = True
    # Below it; empty: nothing.
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The events of a run, as the page's script reads them: see `timeline`."""

    # Names its files.
    name: str
    # The run.
    title: str
    # The events, in columns.
    data: dict[str, Any]
    # Below it; empty: nothing.
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Text that can be copied: a command, a plan."""

    # The text.
    text: str
    # Above it; empty: nothing.
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prose:
    """Sentences under a line of their own: a question and its answer."""

    # The line above.
    title: str
    # The paragraphs.
    paragraphs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure that was drawn elsewhere."""

    # What it shows.
    caption: str
    # The file's content.
    content: bytes
    # What kind of file that is.
    kind: Literal["image/png", "image/svg+xml"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Items that are there when they are asked for."""

    # The line that opens it.
    title: str
    # What is behind it.
    items: tuple[Item, ...]


Item: TypeAlias = Table | BarChart | LineChart | Timeline | Code | Prose | Picture | Fold


def folded(items: Sequence[Item], what: str, most: int = 6) -> tuple[Item, ...]:
    """The first of many, and the rest behind a line; `what` they are, as "timelines"."""
    if len(items) <= most + 1:
        return tuple(items)
    return *items[:most], Fold(title=f"{len(items) - most} more {what}", items=tuple(items[most:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One heading and what is below it."""

    # Names its place in the page: lower-case letters and dashes.
    name: str
    # The heading.
    title: str
    # Paragraphs, first.
    prose: tuple[str, ...] = ()
    # Tables and figures, in order.
    items: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Everything that is shown."""

    # Of the window and at the top.
    title: str
    # Below it: what this is, in a line.
    subtitle: str
    # From top to bottom.
    sections: tuple[Section, ...]
    # At the bottom.
    footer: str = ""
