"""The figure of memory over a step: each worker's memory by category, with its peak.

MiB  ▁▂▃▅▇▇▅▃▂▁   activations
     ▃▃▃▃▃▃▄▅▆▆   gradients
     ▇▇▇▇▇▇▇▇▇▇   parameters, optimizer states
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.patches import Patch

from stagewright.quantity import format_bytes
from stagewright.report.figures.file import write_figure
from stagewright.report.figures.style import draw_grid, new_figure, size_unit, time_unit, write_at
from stagewright.report.palette import GRID, INK, MUTED, color
from stagewright.trace.memory import WorkerMemory

# From the bottom: persistent memory, then temporary memory.
_ORDER = ("parameters", "buffers", "optimizer", "other", "gradients", "activations")
_MAX_WORKERS = 8


def draw_memory(memory: Sequence[WorkerMemory], path: str | Path, title: str) -> Path:
    """Draw memory over a step, of many workers those with the highest peaks, into a .png, .svg or .pdf file."""
    largest = sorted(memory, key=lambda worker: -worker.peak.total_bytes)[:_MAX_WORKERS]
    shown = sorted(largest, key=lambda worker: worker.rank)
    figure = new_figure(11, 1.6 + 1.7 * len(shown))
    all_axes = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    end_s = max(worker.moments[-1].time_s for worker in shown) or 1.0
    scale, unit = time_unit(end_s)
    peak_bytes = max(worker.peak.total_bytes for worker in shown)
    size, size_name = size_unit(peak_bytes)
    for axes, worker in zip(all_axes, shown, strict=True):
        times = [moment.time_s / scale for moment in worker.moments] + [end_s / scale]
        held = [[getattr(moment, name) / size for moment in worker.moments] for name in _ORDER]
        stacks = [[*sizes, sizes[-1]] for sizes in held]
        colors = [color(f"memory-{name}") for name in _ORDER]
        axes.stackplot(times, stacks, colors=colors, step="post", linewidth=0)
        peak = worker.peak
        position = (peak.time_s / scale, peak.total_bytes / size)
        axes.plot(*position, marker="o", markersize=4, color=INK, zorder=5)
        is_right = position[0] > 0.6 * end_s / scale
        text, side = f"{format_bytes(peak.total_bytes)} in {peak.doing}", "right" if is_right else "left"
        write_at(axes, text, position, (-6 if is_right else 6, 5), ha=side, fontsize=8)
        axes.set_ylabel(f"worker {worker.rank}\n({size_name})", color=INK, fontsize=9)
        axes.set_ylim(0, 1.25 * peak_bytes / size)
        draw_grid(axes, "y")
        axes.tick_params(colors=MUTED, length=3)
        axes.spines["left"].set_color(GRID)
        axes.spines["bottom"].set_color(MUTED)
    all_axes[0].set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold")
    all_axes[-1].set_xlabel(f"time in the recorded step ({unit})", color=INK)
    all_axes[-1].set_xlim(0, end_s / scale)
    used = [name for name in _ORDER if any(getattr(moment, name) for worker in shown for moment in worker.moments)]
    keys = [
        Patch(facecolor=color(f"memory-{name}"), label=name.replace("optimizer", "optimizer states"))
        for name in reversed(used)
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False, fontsize=9, labelcolor=INK)
    return write_figure(figure, path)
