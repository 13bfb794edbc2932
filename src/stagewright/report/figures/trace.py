"""The figure of memory over a step: for each worker what it holds, by what it is for, and where that was most.

MiB  ▁▂▃▅▇▇▅▃▂▁   activations
     ▃▃▃▃▃▃▄▅▆▆   gradients
     ▇▇▇▇▇▇▇▇▇▇   parameters, optimiser states
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from stagewright.quantity import format_bytes
from stagewright.report.figures.file import check_figure_path, write_figure
from stagewright.report.figures.timeline import size_unit, time_unit
from stagewright.report.palette import GRID, INK, MUTED, color
from stagewright.trace.memory import WorkerMemory

__all__ = ["draw_memory", "memory_figure"]

# From below: what stays, then what comes and goes.
_ORDER = ("parameters", "buffers", "optimizer", "other", "gradients", "activations")
_MOST = 8


def draw_memory(memory: Sequence[WorkerMemory], path: str | Path, title: str) -> Path:
    """Draw it into a .png, .svg or .pdf file and return its path."""
    path = check_figure_path(path)
    return write_figure(memory_figure(memory, title), path)


def memory_figure(memory: Sequence[WorkerMemory], title: str) -> Figure:
    """The figure as an object; of many workers those that held most."""
    shown = sorted(sorted(memory, key=lambda one: -one.peak.total_bytes)[:_MOST], key=lambda one: one.rank)
    figure = Figure(figsize=(11, 1.6 + 1.7 * len(shown)), dpi=160)
    figure.set_layout_engine("constrained")
    every = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    end_s = max(one.moments[-1].time_s for one in shown) or 1.0
    scale, unit = time_unit(end_s)
    most = max(one.peak.total_bytes for one in shown)
    size, size_name = size_unit(most)
    for axes, worker in zip(every, shown, strict=True):
        times = [one.time_s / scale for one in worker.moments] + [end_s / scale]
        held = [[getattr(one, name) / size for one in worker.moments] for name in _ORDER]
        stacks = [[*each, each[-1]] for each in held]
        colors = [color(f"memory-{name}") for name in _ORDER]
        axes.stackplot(times, stacks, colors=colors, step="post", linewidth=0)
        peak = worker.peak
        at = (peak.time_s / scale, peak.total_bytes / size)
        axes.plot(*at, marker="o", markersize=4, color=INK, zorder=5)
        right = at[0] > 0.6 * end_s / scale
        axes.annotate(
            f"{format_bytes(peak.total_bytes)} in {peak.doing}",
            at,
            xytext=(-6 if right else 6, 5),
            textcoords="offset points",
            ha="right" if right else "left",
            fontsize=8,
            color=INK,
        )
        axes.set_ylabel(f"worker {worker.rank}\n({size_name})", color=INK, fontsize=9)
        axes.set_ylim(0, 1.25 * most / size)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=MUTED, length=3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.spines["left"].set_color(GRID)
        axes.spines["bottom"].set_color(MUTED)
    every[0].set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold")
    every[-1].set_xlabel(f"time in the step whose memory was counted ({unit})", color=INK)
    every[-1].set_xlim(0, end_s / scale)
    used = [name for name in _ORDER if any(getattr(one, name) for worker in shown for one in worker.moments)]
    keys = [Patch(facecolor=color(f"memory-{name}"), label=_LABELS.get(name, name)) for name in reversed(used)]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False, fontsize=9, labelcolor=INK)
    return figure


_LABELS = {"optimizer": "optimiser states"}
