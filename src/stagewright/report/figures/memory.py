"""The figure of the study *memory*: peak memory by category and speed-up of each strategy.

serial              ██████▒▒▒▒░░░░  14.0 MiB      1.00 ×
tensor, recompute   ███▒▒░            7.1 MiB      1.31 ×
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from stagewright.quantity import format_bytes
from stagewright.report.figures.file import write_figure
from stagewright.report.figures.style import draw_grid, new_figure, write_at
from stagewright.report.palette import INK, MUTED, stage_color

_KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "other")
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBar:
    """One strategy."""

    label: str
    memory: Mapping[str, int]
    """Bytes at the peak of the worker that needs most, by category."""
    speedup: float | None
    """Over the single-device baseline, if known."""


def draw_memory(bars: Sequence[MemoryBar], path: str | Path, *, title: str) -> Path:
    """Draw one bar per strategy into a .png, .svg or .pdf file."""
    return write_figure(memory_figure(bars, title=title), path)


def memory_figure(bars: Sequence[MemoryBar], *, title: str) -> Figure:
    """Draw one bar per strategy."""
    figure = new_figure(8.4, 1.6 + 0.42 * max(1, len(bars)))
    axes = figure.subplots()
    for row, bar in enumerate(bars):
        left = 0.0
        for index, kind in enumerate(_KINDS):
            size = bar.memory.get(kind, 0) / _MIB
            if size:
                axes.barh(row, size, 0.72, left=left, color=stage_color(index), zorder=3)
                left += size
        speedup = "" if bar.speedup is None else f"   {bar.speedup:.2f} ×"
        write_at(axes, f"{format_bytes(left * _MIB)}{speedup}", (left, row), (5, 0), va="center", fontsize=8.5)
    shown = [kind for kind in _KINDS if any(bar.memory.get(kind) for bar in bars)]
    for kind in shown:
        axes.barh(0, 0, color=stage_color(_KINDS.index(kind)), label=kind)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars], color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.22)
    axes.set_xlabel("peak memory of the worker that needs most (MiB), and speed-up over the baseline", color=INK)
    axes.tick_params(axis="x", colors=MUTED)
    draw_grid(axes, "x", ("top", "right", "left"))
    if shown:
        figure.legend(loc="outside lower center", ncols=len(shown), frameon=False, fontsize=8.5, labelcolor=INK)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    return figure
