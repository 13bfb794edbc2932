"""The figure of a step's timeline: a lane a worker, its memory below.

worker 0   ██ ██ ██        ▒▒▒▒ ██ ▒▒▒▒     compute: forward full colour, backward tint, numbers are micro-batches
           ▂▂  ▂▂                           links: what it sends (below the lane); collectives hatched
memory     ▁▂▃▃▃▃▃▃▃▃▂▂▁
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from stagewright.errors import UsageError
from stagewright.forecast.value import Forecast, Segment
from stagewright.quantity import format_s
from stagewright.report.figure_file import check_figure_path, write_figure
from stagewright.report.palette import GRID, INK, MUTED, stage_color, tint

__all__ = ["draw_timeline", "timeline_figure"]

_LANE = 0.62
_LINK = 0.14
_MOST_LABELS = 400
_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def draw_timeline(forecast: Forecast, path: str | Path) -> Path:
    """Draw the timeline and the memory into a .png, .svg or .pdf file and return its path."""
    path = check_figure_path(path)
    return write_figure(timeline_figure(forecast), path)


def timeline_figure(forecast: Forecast) -> Figure:
    """The figure as an object."""
    if not forecast.segments:
        raise UsageError(
            f"a step of {forecast.microbatches} micro-batches on {len(forecast.workers)} stages is too long to be "
            "drawn; use fewer micro-batches"
        )
    scale, unit = next(one for one in (*_SCALES, _SCALES[-1]) if forecast.step_s >= one[0] or one is _SCALES[-1])
    lanes = len(forecast.workers)
    figure = Figure(figsize=(11, 2.6 + 0.62 * lanes + 1.5), dpi=160)
    figure.set_layout_engine("constrained", hspace=0.05)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[0.62 * lanes + 0.4, 1.7])
    label = len(forecast.segments) <= _MOST_LABELS
    for segment in forecast.segments:
        _draw(upper, segment, scale, label=label, step=forecast.step_s)
    upper.set_yticks(range(lanes), [f"worker {one.worker}" for one in forecast.workers], color=INK)
    upper.set_ylim(lanes - 0.45, -0.55)
    upper.set_title(_title(forecast), loc="left", color=INK, fontsize=12, fontweight="bold", pad=20)
    upper.annotate(
        f"step {format_s(forecast.step_s)}, {forecast.samples_per_s:.4g} samples/s, speed-up {forecast.speedup:.2f} × "
        "over one device",
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 6),
        textcoords="offset points",
        color=MUTED,
        fontsize=9,
    )
    _draw_memory(lower, forecast, scale)
    lower.set_xlabel(f"time ({unit})", color=INK)
    lower.set_xlim(0, forecast.step_s / scale)
    for axes in (upper, lower):
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=MUTED, length=3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.spines["left"].set_color(GRID)
        axes.spines["bottom"].set_color(MUTED)
    upper.tick_params(axis="y", length=0, labelcolor=INK)
    _legend(figure, forecast)
    return figure


def _draw(axes: Axes, segment: Segment, scale: float, *, label: bool, step: float) -> None:
    left, width, lane = segment.start_s / scale, (segment.end_s - segment.start_s) / scale, segment.worker
    color = stage_color(segment.stage) if segment.stage >= 0 else MUTED
    if segment.stream == "receive":
        return
    if segment.stream == "send":
        axes.barh(lane + _LANE / 2 + _LINK / 2, width, _LINK, left=left, color=color, alpha=0.55, zorder=3)
        return
    if segment.stream in ("tensor", "data"):
        depth = _LANE if segment.stream == "tensor" else _LINK
        at = lane if segment.stream == "tensor" else lane - _LANE / 2 - _LINK / 2
        axes.barh(
            at, width, depth, left=left, facecolor="white", edgecolor=color, hatch="/////", linewidth=0.6, zorder=4
        )
        return
    face = MUTED if segment.name == "optimizer" else color if segment.name == "F" else tint(color)
    axes.barh(lane, width, _LANE, left=left, color=face, edgecolor="white", linewidth=0.4, zorder=3)
    if label and segment.microbatch >= 0 and segment.end_s - segment.start_s > 0.012 * step:
        ink = "white" if segment.name == "F" else INK
        axes.text(
            left + width / 2, lane, str(segment.microbatch), ha="center", va="center", fontsize=7, color=ink, zorder=5
        )


def _draw_memory(axes: Axes, forecast: Forecast, scale: float) -> None:
    size, unit = _size(forecast.peak_memory_bytes)
    for worker in forecast.workers:
        memory = worker.memory
        times = [one / scale for one in (*memory.times_s, forecast.step_s)]
        held = [one / size for one in (*memory.held_bytes, memory.held_bytes[-1])]
        color = stage_color(worker.stages[0])
        axes.step(times, held, where="post", color=color, linewidth=1.3, label=f"worker {worker.worker}")
        if worker.memory_limit_bytes is not None and worker.memory_limit_bytes < 3 * forecast.peak_memory_bytes:
            axes.axhline(worker.memory_limit_bytes / size, color=color, linewidth=0.9, linestyle=(0, (4, 2)))
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"memory ({unit})", color=INK)
    if len(forecast.workers) <= 8:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, ncols=4, loc="lower right")


def _size(peak: int) -> tuple[float, str]:
    return next(
        ((size, unit) for size, unit in ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")) if peak >= size),
        (1.0, "bytes"),
    )


def _legend(figure: Figure, forecast: Forecast) -> None:
    streams = {one.stream for one in forecast.segments}
    keys: list[Artist] = [Patch(facecolor=MUTED, label="forward"), Patch(facecolor=tint(MUTED), label="backward")]
    if "send" in streams:
        keys.append(Patch(facecolor=MUTED, alpha=0.55, label="sending (below)"))
    if streams & {"tensor", "data"}:
        keys.append(Patch(facecolor="white", edgecolor=MUTED, hatch="/////", label="collective"))
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False, fontsize=9, labelcolor=INK)


def _title(forecast: Forecast) -> str:
    chunks = f"{forecast.schedule}, {forecast.microbatches} micro-batches" if len(forecast.workers) > 1 else "one stage"
    return f"{forecast.model}: {forecast.strategy} on {forecast.num_workers} workers, {chunks} (forecast)"
