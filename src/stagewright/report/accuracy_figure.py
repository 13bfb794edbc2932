"""The figure of the study *codecs*: accuracy over the share of bytes that travels, one panel a data set.

accuracy  ─ ─ ─ ─ ─ ─ ─ ─ ─ ─  without a codec, with its deviation
   │   ●    ●          ◇
   │ ◇                          dots are ours, diamonds sort quantisation
   └──── ratio
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from stagewright.report.figure_file import check_figure_path, write_figure
from stagewright.report.palette import GRID, INK, MUTED, stage_color

__all__ = ["AccuracyPoint", "draw_accuracy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyPoint:
    """One codec."""

    # Its name.
    label: str
    # Bytes that travel over bytes without a codec.
    ratio: float
    # Mean over seeds in %, and its deviation.
    accuracy: float
    deviation: float
    # Whether it is no codec at all, and whether it is sort quantisation.
    is_baseline: bool = False
    is_published: bool = False


def draw_accuracy(panels: Mapping[str, Sequence[AccuracyPoint]], path: str | Path, *, title: str) -> Path:
    """Draw one panel a data set into a .png, .svg or .pdf file."""
    path = check_figure_path(path)
    figure = Figure(figsize=(5.2 * max(1, len(panels)) + 0.4, 4.4), dpi=160)
    figure.set_layout_engine("constrained")
    all_axes = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    for axes, (name, points) in zip(all_axes, panels.items(), strict=False):
        for point in [one for one in points if one.is_baseline]:
            low, high = point.accuracy - point.deviation, point.accuracy + point.deviation
            axes.axhspan(low, high, color=GRID, zorder=1)
            axes.axhline(point.accuracy, color=MUTED, linewidth=1, linestyle=(0, (4, 2)), label="no codec", zorder=2)
        rest = sorted((one for one in points if not one.is_baseline), key=lambda one: one.ratio)
        for at, point in enumerate(rest):
            color = stage_color(1) if point.is_published else stage_color(0)
            axes.errorbar(
                point.ratio,
                point.accuracy,
                yerr=point.deviation or None,
                fmt="D" if point.is_published else "o",
                color=color,
                markersize=6,
                capsize=3,
                zorder=4,
            )
            axes.annotate(
                point.label,
                (point.ratio, point.accuracy),
                # Codecs of the same size stand above each other: one's name to the right, the next one's to the left.
                xytext=(-6, 4) if at % 2 else (6, 4),
                ha="right" if at % 2 else "left",
                textcoords="offset points",
                color=INK,
                fontsize=8,
            )
        axes.plot([], [], "o", color=stage_color(0), label="ours")
        axes.plot([], [], "D", color=stage_color(1), label="sort quantisation")
        axes.set_title(name, loc="left", color=INK, fontsize=10)
        axes.set_xlabel("bytes that travel, of fp32", color=INK)
        axes.set_xlim(0, max((one.ratio for one in rest), default=1.0) * 1.25)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    all_axes[0].set_ylabel("accuracy (%)", color=INK)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    return write_figure(figure, path)
