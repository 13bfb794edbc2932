"""The figure of a step's timeline: one lane per worker; below, a second timeline to compare with, or memory.

worker 0   ██ ██ ██        ▒▒▒▒ ██ ▒▒▒▒     compute: forward full color, backward tint, micro-batch numbers
           ▂▂  ▂▂                           P2P sends below the lane; collectives hatched
memory     ▁▂▃▃▃▃▃▃▃▃▂▂▁
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from stagewright.errors import UsageError
from stagewright.report.figures.file import check_figure_path, write_figure
from stagewright.report.figures.style import DASHES, draw_grid, new_figure, size_unit, time_unit, write_caption
from stagewright.report.palette import GRID, INK, MUTED, readable_on, stage_color, tint
from stagewright.report.timeline import Bar, Timeline, forecast_timeline
from stagewright.simulator.forecast import Forecast

_LANE = 0.62
_LINK = 0.14
_MAX_LABELS = 400


def plot_forecast(forecast: Forecast, path: str | Path) -> Path:
    """Draw a forecast's timeline."""
    if not forecast.segments:
        raise UsageError(f"can't draw {path}: a step this large has no timeline; use fewer micro-batches or stages")
    return draw_timeline(forecast_timeline(forecast), path)


def draw_timeline(timeline: Timeline, path: str | Path, beside: Timeline | None = None) -> Path:
    """Draw a timeline into a .png, .svg or .pdf file and return its path."""
    path = check_figure_path(path)
    return write_figure(timeline_figure(timeline, beside), path)


def timeline_figure(timeline: Timeline, beside: Timeline | None = None) -> Figure:
    """Return the figure; ``beside`` is drawn below on the same time axis."""
    shown = [timeline] if beside is None else [timeline, beside]
    for drawn in shown:
        if not drawn.bars:
            raise UsageError(f"{drawn.title}: the step is too long to draw; use fewer micro-batches")
    longest = max(drawn.step_s for drawn in shown)
    scale, unit = time_unit(longest)
    heights = [0.62 * len(drawn.lanes) + 0.4 for drawn in shown]
    with_memory = beside is None and bool(timeline.memory)
    heights += [1.7] * with_memory
    figure = new_figure(11, 1.7 + sum(heights) + 0.5 * len(shown), hspace=0.05)
    grid = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
    all_axes: list[Axes] = list(grid[:, 0])
    for axes, drawn in zip(all_axes, shown, strict=False):
        _draw_lanes(axes, drawn, scale)
    if with_memory:
        _draw_memory(all_axes[-1], timeline, scale)
    all_axes[-1].set_xlabel(f"time ({unit})", color=INK)
    all_axes[-1].set_xlim(0, longest / scale)
    for axes in all_axes:
        draw_grid(axes, "x")
        axes.tick_params(colors=MUTED, length=3)
        axes.spines["left"].set_color(GRID)
        axes.spines["bottom"].set_color(MUTED)
    for axes, _ in zip(all_axes, shown, strict=False):
        axes.tick_params(axis="y", length=0, labelcolor=INK)
    _add_legend(figure, [bar for drawn in shown for bar in drawn.bars])
    return figure


def _draw_lanes(axes: Axes, timeline: Timeline, scale: float) -> None:
    label = len(timeline.bars) <= _MAX_LABELS
    for bar in timeline.bars:
        _draw_bar(axes, bar, scale, label=label, step=timeline.step_s)
    lanes = len(timeline.lanes)
    axes.set_yticks(range(lanes), timeline.lanes, color=INK)
    axes.set_ylim(lanes - 0.45, -0.55)
    axes.set_title(timeline.title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=20)
    write_caption(axes, timeline.caption)


def _draw_bar(axes: Axes, bar: Bar, scale: float, *, label: bool, step: float) -> None:
    left, width, lane = bar.start_s / scale, (bar.end_s - bar.start_s) / scale, bar.lane
    color = stage_color(bar.stage) if bar.stage >= 0 else MUTED
    if bar.stream in ("receive", "wait"):
        return
    if bar.stream == "send":
        axes.barh(lane + _LANE / 2 + _LINK / 2, width, _LINK, left=left, color=color, alpha=0.55, zorder=3)
        return
    if bar.stream in ("tensor", "data"):
        depth = _LANE if bar.stream == "tensor" else _LINK
        middle = lane if bar.stream == "tensor" else lane - _LANE / 2 - _LINK / 2
        axes.barh(
            middle, width, depth, left=left, facecolor="white", edgecolor=color, hatch="/////", linewidth=0.6, zorder=4
        )
        return
    faces = {"optimizer": INK, "codec": "#FFFFFF", "F": color, "L": color, "R": tint(color, 0.3), "W": tint(color, 0.8)}
    face = faces.get(bar.name, tint(color))
    edge = 0.4 if width > 0.004 * step / scale else 0.0  # an edge would cover narrower bars
    hatch = {"edgecolor": INK, "hatch": "....", "linewidth": 0.4} if bar.name == "codec" else {}
    style = {"edgecolor": "white", "linewidth": edge, **hatch}
    axes.barh(lane, width, _LANE, left=left, facecolor=face, zorder=3, **style)  # type: ignore[arg-type]
    if label and bar.name not in ("L", "R") and bar.microbatch >= 0 and bar.end_s - bar.start_s > 0.012 * step:
        ink = readable_on(face)
        axes.text(
            left + width / 2, lane, str(bar.microbatch), ha="center", va="center", fontsize=7, color=ink, zorder=5
        )


def _draw_memory(axes: Axes, timeline: Timeline, scale: float) -> None:
    size, unit = size_unit(timeline.peak_memory_bytes)
    for line in timeline.memory:
        times = [time_s / scale for time_s in (*line.times_s, timeline.step_s)]
        held = [num_bytes / size for num_bytes in (*line.held_bytes, line.held_bytes[-1])]
        color = stage_color(line.stage)
        axes.step(times, held, where="post", color=color, linewidth=1.3, label=line.label)
        if line.limit_bytes is not None and line.limit_bytes < 3 * timeline.peak_memory_bytes:
            axes.axhline(line.limit_bytes / size, color=color, linewidth=0.9, linestyle=DASHES)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"memory ({unit})", color=INK)
    if len(timeline.memory) <= 8:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, ncols=4, loc="lower right")


def _add_legend(figure: Figure, bars: list[Bar]) -> None:
    streams, names = {bar.stream for bar in bars}, {bar.name for bar in bars}
    keys: list[Artist] = [Patch(facecolor=MUTED, label="forward")]
    if names & {"B", "I", "W"}:
        label = "backward, or input gradient (B)" if "W" in names else "backward"
        keys.append(Patch(facecolor=tint(MUTED), label=label))
    if "W" in names:
        keys.append(Patch(facecolor=tint(MUTED, 0.8), label="weight gradient (W)"))
    if "R" in names:
        keys.append(Patch(facecolor=tint(MUTED, 0.3), label="recompute"))
    if "codec" in names:
        keys.append(Patch(facecolor="white", edgecolor=INK, hatch="....", label="codec"))
    if "optimizer" in names:
        keys.append(Patch(facecolor=INK, label="optimizer"))
    if "send" in streams:
        keys.append(Patch(facecolor=MUTED, alpha=0.55, label="P2P send (below)"))
    if streams & {"tensor", "data"}:
        keys.append(Patch(facecolor="white", edgecolor=MUTED, hatch="/////", label="collective"))
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False, fontsize=9, labelcolor=INK)
