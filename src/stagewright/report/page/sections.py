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

    title: str = ""
    """Above it; empty: nothing."""
    head: tuple[str, ...]
    """The columns' names."""
    rows: tuple[tuple[str, ...], ...]
    """The cells, row by row."""
    right: frozenset[int] = frozenset()
    """Columns whose cells stand at the right, by place."""
    marked: frozenset[int] = frozenset()
    """Rows that are to be seen first, by place: plans differ there."""
    note: str = ""
    """Below it; empty: nothing."""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.head) for row in self.rows), self.title


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPart:
    """One piece of a bar."""

    name: str
    """What it is; in the legend where a chart has several names."""
    paint: str
    """Its colour's name."""
    start: float
    """From where to where."""
    end: float
    hint: str = ""
    """What is shown beside the pointer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row of a bar chart."""

    label: str
    """At its left."""
    parts: tuple[BarPart, ...]
    """The pieces."""
    text: str = ""
    """At its right."""
    mark: float | None = None
    """Where the ideal is; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """Bars from a common origin."""

    name: str
    """Names its files."""
    title: str
    """Says what is shown, with the unit."""
    quantity: Quantity
    """Of the axis."""
    bars: tuple[Bar, ...]
    """The rows."""
    mark_name: str = ""
    """What a mark means."""
    in_table: bool = False
    """Whether a table of the page has the same numbers: Markdown leaves it out."""
    note: str = ""
    """Below it; empty: nothing."""

    @property
    def legend(self) -> tuple[tuple[str, str], ...]:
        """Names with their colours, in order; empty where they say nothing."""
        pairs = dict.fromkeys((part.name, part.paint) for bar in self.bars for part in bar.parts if part.name)
        return tuple(pairs) if len({name for name, _ in pairs}) > 1 else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve."""

    name: str
    """In the legend."""
    paint: str
    """Its colour's name."""
    x: tuple[float, ...]
    """The points."""
    y: tuple[float, ...]
    style: Literal["line", "step", "dots"] = "line"
    """How points are joined: by a line, held until the next one, or not."""
    dashed: bool = False
    """Whether the line is broken, for those who can't tell colours."""

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.y), self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Curves over a number."""

    name: str
    """Names its files."""
    title: str
    """Says what is shown."""
    x_title: str
    """Names of the axes, with units where a quantity has none."""
    y_title: str
    lines: tuple[Line, ...]
    """The curves."""
    x_quantity: Quantity = "number"
    """Of the axes."""
    y_quantity: Quantity = "number"
    x_log: bool = False
    """Logarithmic axes."""
    y_log: bool = False
    from_zero: bool = True
    """Whether 0 is on the vertical axis."""
    note: str = ""
    """Below it; empty: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The events of a run, as the page's script reads them: see `timeline`."""

    name: str
    """Names its files."""
    title: str
    """The run."""
    data: dict[str, Any]
    """The events, in columns."""
    note: str = ""
    """Below it; empty: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Text that can be copied: a command, a plan."""

    text: str
    """The text."""
    title: str = ""
    """Above it; empty: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prose:
    """Sentences under a line of their own: a question and its answer."""

    title: str
    """The line above."""
    paragraphs: tuple[str, ...]
    """The paragraphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure that was drawn elsewhere."""

    caption: str
    """What it shows."""
    content: bytes
    """The file's content."""
    kind: Literal["image/png", "image/svg+xml"]
    """What kind of file that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Items that are there when they are asked for."""

    title: str
    """The line that opens it."""
    items: tuple[Item, ...]
    """What is behind it."""


Item: TypeAlias = Table | BarChart | LineChart | Timeline | Code | Prose | Picture | Fold


def folded(items: Sequence[Item], what: str, most: int = 6) -> tuple[Item, ...]:
    """The first of many, and the rest behind a line; `what` they are, as "timelines"."""
    if len(items) <= most + 1:
        return tuple(items)
    return *items[:most], Fold(title=f"{len(items) - most} more {what}", items=tuple(items[most:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One heading and what is below it."""

    name: str
    """Names its place in the page: lower-case letters and dashes."""
    title: str
    """The heading."""
    prose: tuple[str, ...] = ()
    """Paragraphs, first."""
    items: tuple[Item, ...] = ()
    """Tables and figures, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Everything that is shown."""

    title: str
    """Of the window and at the top."""
    subtitle: str
    """Below it: what this is, in a line."""
    sections: tuple[Section, ...]
    """From top to bottom."""
    footer: str = ""
    """At the bottom."""
