"""The values that a report page consists of.

    Page
      Section "Speed-up"    paragraphs, then items in order:
        Table               `stagewright.table.Table`; a row of strong cells is highlighted
        BarChart            ── label ──────────── 123/s      one row per bar, its text on the right
                            ██████████▌     │                │ marks the ideal
        LineChart           curves, steps or dots
        Timeline            every worker's events, with zoom
        Code, Prose         text to copy; a question with its answer
        Card                the findings in a few named sentences
        Picture             a figure drawn elsewhere
        Fold                items behind a line that opens

All text is plain: HTML and Markdown escape it. Colors are names from `report.palette`, so they follow light and dark
mode. To add custom sections: `build_report(paths, extra=[Section(…)])`, then `page_html(report.page)`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from stagewright.table import Table

# What an axis counts, which decides how its ticks are written.
Quantity: TypeAlias = Literal["number", "count", "seconds", "bytes", "times", "share"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPart:
    """One segment of a bar."""

    name: str
    """Shown in the legend of charts with several names."""
    paint: str
    start: float
    end: float
    hint: str = ""
    """Tooltip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row of a bar chart."""

    label: str
    parts: tuple[BarPart, ...]
    text: str = ""
    """Shown on the right."""
    mark: float | None = None
    """Position of the ideal, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """Horizontal bars from a common origin."""

    name: str
    """File name of the figure."""
    title: str
    quantity: Quantity
    bars: tuple[Bar, ...]
    mark_name: str = ""
    """Legend of the marks."""
    in_table: bool = False
    """Whether a table of the page has the same numbers, so that Markdown leaves the chart out."""
    note: str = ""

    @property
    def legend(self) -> tuple[tuple[str, str], ...]:
        """Part names with their colors, in order; empty if there is only one name."""
        pairs = dict.fromkeys((part.name, part.paint) for bar in self.bars for part in bar.parts if part.name)
        return tuple(pairs) if len({name for name, _ in pairs}) > 1 else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve."""

    name: str
    paint: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    style: Literal["line", "step", "dots"] = "line"
    """Points joined by lines, held until the next one, or not joined."""
    dashed: bool = False
    """Dashed lines are distinguishable without color."""

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.y), self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Curves over a number."""

    name: str
    """File name of the figure."""
    title: str
    x_title: str
    """With the unit where the quantity has none."""
    y_title: str
    lines: tuple[Line, ...]
    x_quantity: Quantity = "number"
    y_quantity: Quantity = "number"
    x_log: bool = False
    y_log: bool = False
    from_zero: bool = True
    """Whether the vertical axis includes 0."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The events of a run, in the format of the page's script: see `content.timeline`."""

    name: str
    """File name of the figure."""
    title: str
    data: dict[str, Any]
    """Events in columns."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Text to copy: a command or a plan."""

    text: str
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prose:
    """Paragraphs under a heading, such as a question and its answer."""

    title: str
    paragraphs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A few sentences, each under its name, in a frame."""

    title: str
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure drawn elsewhere."""

    caption: str
    content: bytes
    kind: Literal["image/png", "image/svg+xml"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Items that are hidden until their title is clicked."""

    title: str
    items: tuple[Item, ...]


Item: TypeAlias = Table | BarChart | LineChart | Timeline | Code | Prose | Card | Picture | Fold


def slug(text: str) -> str:
    """Reduce text to lower-case letters, digits and dashes, for file names and anchors; never empty."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60].strip("-") or "run"


def plain_bar(
    label: str, paint: str, end: float, text: str, *, start: float = 0.0, hint: str = "", mark: float | None = None
) -> Bar:
    """Return a bar of a single segment."""
    return Bar(
        label=label, parts=(BarPart(name="", paint=paint, start=start, end=end, hint=hint),), text=text, mark=mark
    )


def fold_items(items: Sequence[Item], kind: str, max_shown: int = 6) -> tuple[Item, ...]:
    """Show the first items and fold the rest; ``kind`` names them, as in "timelines"."""
    if len(items) <= max_shown + 1:
        return tuple(items)
    return *items[:max_shown], Fold(title=f"{len(items) - max_shown} more {kind}", items=tuple(items[max_shown:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading and its content."""

    name: str
    """Anchor in the page: lower-case letters and dashes."""
    title: str
    prose: tuple[str, ...] = ()
    """Paragraphs above the items."""
    items: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A whole report page."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]
    footer: str = ""
