"""The page's charts as .svg and .png files, drawn by matplotlib, for slides and papers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from stagewright.errors import UsageError
from stagewright.report.figures.file import write_figure
from stagewright.report.figures.style import draw_grid, new_figure, write_at
from stagewright.report.page.charts.axis import format_tick, log_ticks, ticks
from stagewright.report.page.sections import BarChart, Fold, Item, LineChart, Page, Timeline, slug
from stagewright.report.palette import GRID, INK, MUTED, color
from stagewright.report.render.markdown import one_line

_SUFFIXES = (".svg", ".png")
_THIN = 0.16


def write_figures(page: Page, folder: str | Path) -> list[Path]:
    """Write every figure of the page into a folder, as SVG and PNG."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"can't create the folder {folder}: {error.strerror}; choose another --figures") from None
    paths: list[Path] = []
    used: set[str] = set()
    for item in _figures(page):
        name = slug(item.name)
        while name in used:
            name += "-2"
        used.add(name)
        figure = chart_figure(item)
        paths += [write_figure(figure, folder / f"{name}{suffix}") for suffix in _SUFFIXES]
    return paths


def chart_figure(item: BarChart | LineChart | Timeline) -> Figure:
    if isinstance(item, BarChart):
        return _bar_figure(item)
    return _line_figure(item) if isinstance(item, LineChart) else _timeline_figure(item)


def _figures(page: Page) -> Iterator[BarChart | LineChart | Timeline]:
    def find_charts(items: tuple[Item, ...]) -> Iterator[BarChart | LineChart | Timeline]:
        for item in items:
            if isinstance(item, Fold):
                yield from find_charts(item.items)
            elif isinstance(item, BarChart | LineChart | Timeline):
                yield item

    for section in page.sections:
        yield from find_charts(section.items)


def _bar_figure(chart: BarChart) -> Figure:
    figure = new_figure(9, 1.3 + 0.42 * len(chart.bars))
    axes = figure.subplots()
    for row, bar in enumerate(chart.bars):
        for part in bar.parts:
            axes.barh(row, part.end - part.start, 0.62, left=part.start, color=color(part.paint), zorder=3)
        if bar.mark is not None:
            axes.plot([bar.mark, bar.mark], [row - 0.4, row + 0.4], color=INK, linewidth=2.2, zorder=4)
        right = max([bar.mark or 0.0, *(part.end for part in bar.parts)])
        write_at(axes, _plain(bar.text), (right, row), (5, 0), va="center", fontsize=8.5)
    axes.set_yticks(range(len(chart.bars)), [_plain(bar.label) for bar in chart.bars], color=INK, fontsize=9)
    axes.invert_yaxis()
    ends = [part.end for bar in chart.bars for part in bar.parts] + [bar.mark or 0.0 for bar in chart.bars]
    axes.set_xlim(min(0.0, *ends), (max(ends) or 1.0) * 1.3)
    axes.set_xticks(ticks(0.0, max(ends) or 1.0, chart.quantity))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value, chart.quantity)))
    axes.set_title(_plain(chart.title), loc="left", color=INK, fontsize=11, fontweight="bold")
    keys: list[Artist] = [Patch(facecolor=color(paint), label=_plain(name)) for name, paint in chart.legend]
    if chart.mark_name:
        keys.append(Line2D([], [], color=INK, linewidth=2.2, label=_plain(chart.mark_name)))
    if keys:
        figure.legend(handles=keys, loc="outside lower center", ncols=min(6, len(keys)), frameon=False, fontsize=8.5)
    _style(axes, "x")
    return figure


def _line_figure(chart: LineChart) -> Figure:
    figure = new_figure(9, 4.2)
    axes = figure.subplots()
    for line in chart.lines:
        style: dict[str, Any] = {"color": color(line.paint), "label": _plain(line.name)}
        if line.style == "dots":
            axes.plot(line.x, line.y, ".", markersize=3, **style)
        else:
            drawstyle: Any = "steps-post" if line.style == "step" else "default"
            dashes = "--" if line.dashed else "-"
            axes.plot(line.x, line.y, linewidth=1.6, drawstyle=drawstyle, linestyle=dashes, **style)
    for axis, log, quantity, name in (
        (axes.xaxis, chart.x_log, chart.x_quantity, chart.x_title),
        (axes.yaxis, chart.y_log, chart.y_quantity, chart.y_title),
    ):
        if log:
            (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
            low, high = axis.get_data_interval()
            axis.set_ticks(log_ticks(max(low, 1e-12), max(high, 1e-12)))
            axis.set_minor_formatter(NullFormatter())
        elif any(line.x for line in chart.lines):
            low, high = axis.get_data_interval()
            axis.set_ticks(ticks(0.0 if axis is axes.yaxis and chart.from_zero else low, high, quantity))
        axis.set_major_formatter(FuncFormatter(lambda value, _, kind=quantity: format_tick(value, kind)))
        axis.set_label_text(_plain(name), color=INK)
    if chart.from_zero and not chart.y_log:
        axes.set_ylim(bottom=0)
    axes.set_title(_plain(chart.title), loc="left", color=INK, fontsize=11, fontweight="bold")
    if len(chart.lines) > 1:
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    _style(axes, "both")
    return figure


def _timeline_figure(timeline: Timeline) -> Figure:
    """Draw the step that the page shows first: a lane per worker, P2P and collectives below it."""
    data = timeline.data
    unit, workers = data["unit_s"], data["workers"]
    begin, end = next((first, last) for step, first, last in data["steps"] if step == data["median"])
    figure = new_figure(11, 1.6 + 0.62 * len(workers))
    axes = figure.subplots()
    for row, worker in enumerate(workers):
        for number, lane in enumerate(worker["lanes"]):
            _draw_lane(axes, lane, float(row), number, data)
    axes.set_yticks(range(len(workers)), [_plain(worker["label"]) for worker in workers], color=INK, fontsize=9)
    axes.set_ylim(len(workers) - 0.3, -0.5)
    axes.set_xlim(0, (end - begin) * unit)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value, "seconds")))
    axes.set_title(
        _plain(f"{timeline.title}: step {data['median']}"), loc="left", color=INK, fontsize=11, fontweight="bold"
    )
    keys = [Patch(facecolor=color(paint), label=name) for name, paint in _legend(_kinds(data)).items()]
    figure.legend(handles=keys, loc="outside lower center", ncols=min(4, len(keys)), frameon=False, fontsize=8.5)
    _style(axes, "x")
    return figure


def _kinds(data: dict[str, Any]) -> set[str]:
    """The kinds of events that a timeline has."""
    lanes = [lane for worker in data["workers"] for lane in worker["lanes"]]
    indices = {_value(lane["kind"], index) for lane in lanes for index in range(len(lane["begin"]))}
    return {data["kinds"][index] for index in indices}


def _legend(kinds: Collection[str]) -> dict[str, str]:
    """The color name of each kind of event that is drawn, by its name for people."""
    names = {
        "forward": ("forward and P2P send, in the color of the stage", "stage-0"),
        "backward": ("backward, paler", "stage-0-pale"),
        "recompute": ("recompute", "share-bubble"),
        "collective": ("collective", "share-collective"),
        "encode": ("codec encode, decode", "tone-good"),
        "receive": ("waiting for a P2P receive", "grid"),
        "optimizer": ("optimizer", "muted"),
    }
    return dict(shown for start, shown in names.items() if any(kind.startswith(start) for kind in kinds))


def _draw_lane(axes: Axes, lane: dict[str, Any], row: float, number: int, data: dict[str, Any]) -> None:
    """Draw one stream of a worker; what happens inside an action covers its lower half."""
    unit, kinds = data["unit_s"], data["kinds"]
    begin, end = next((first, last) for step, first, last in data["steps"] if step == data["median"])
    start = 0
    for index, (gap, length) in enumerate(zip(lane["begin"], lane["length"], strict=True)):
        start += gap
        if start + length < begin or start > end:
            continue
        kind, stage = kinds[_value(lane["kind"], index)], _value(lane["stage"], index)
        middle, height = row, 0.5
        if lane["stream"] != "compute":
            middle, height = row + 0.28 + _THIN * (number - 0.5), _THIN
        elif kind in ("collective", "recompute", "encode", "decode"):
            middle, height = row + 0.14, 0.22
        left, width = (start - begin) * unit, length * unit
        axes.barh(middle, width, height, left=left, color=color(_paint(kind, stage)), zorder=3, linewidth=0)


def _paint(kind: str, stage: int) -> str:
    """Return the color name that the page's script uses."""
    fixed = {
        "optimizer": "muted",
        "recompute": "share-bubble",
        "receive": "grid",
        "encode": "tone-good",
        "decode": "tone-good",
        "collective": "share-collective",
    }
    if kind in fixed or stage < 0:
        return fixed.get(kind, "muted")
    return f"stage-{stage % 16}{'-pale' if kind.startswith('backward') else ''}"


def _value(column: list[int] | int, index: int) -> int:
    return column[index] if isinstance(column, list) else column


def _style(axes: Axes, grid: Any) -> None:
    draw_grid(axes, grid)
    axes.tick_params(colors=MUTED, length=3)
    axes.tick_params(axis="y", labelcolor=INK)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)


def _plain(text: str) -> str:
    """Escape text that matplotlib would read as mathematics."""
    return one_line(text).replace("$", r"\$")
