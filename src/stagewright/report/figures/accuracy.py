"""The figure of the study *codecs*: the accuracy with each codec, one panel a data set.

bf16    0.500 │        ┊ ├─●─┤       one row a codec, the smallest below, with the share of bytes that travels
block4  0.141 │    ├───●───┤         dots are ours, diamonds sort quantisation
sort3+1 0.125 │ ├─◇─┤  ┊             dashed: without a codec, with its deviation
              └─────────── accuracy
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stagewright.report.figures.file import check_figure_path, write_figure
from stagewright.report.palette import GRID, INK, MUTED, stage_color

__all__ = ["AccuracyPoint", "draw_accuracy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyPoint:
    """One codec."""

    label: str
    """Its name."""
    ratio: float
    """Bytes that travel over bytes without a codec."""
    accuracy: float
    """Mean over seeds in %, and its deviation."""
    deviation: float
    is_baseline: bool = False
    """Whether it is no codec at all, and whether it is sort quantisation."""
    is_published: bool = False


def draw_accuracy(
    panels: Mapping[str, Sequence[AccuracyPoint]],
    path: str | Path,
    *,
    title: str,
    measures: Mapping[str, str] | None = None,
) -> Path:
    """Draw one panel a data set into a .png, .svg or .pdf file.

    ``measures``: what is measured, of panels where that is not accuracy.
    """
    path = check_figure_path(path)
    most = max((len(points) for points in panels.values()), default=0)
    figure = Figure(figsize=(5.2 * max(1, len(panels)) + 0.4, 1.6 + 0.3 * most), dpi=160)
    figure.set_layout_engine("constrained")
    all_axes = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    for axes, (name, points) in zip(all_axes, panels.items(), strict=False):
        _draw_panel(axes, points)
        axes.set_xlabel((measures or {}).get(name, "accuracy (%)"), color=INK)
        axes.set_title(name, loc="left", color=INK, fontsize=10)
    all_axes[0].set_ylabel("codec, bytes that travel of fp32", color=INK)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    return write_figure(figure, path)


def _draw_panel(axes: Axes, points: Sequence[AccuracyPoint]) -> None:
    for point in [one for one in points if one.is_baseline]:
        low, high = point.accuracy - point.deviation, point.accuracy + point.deviation
        axes.axvspan(low, high, color=GRID, zorder=1)
        axes.axvline(point.accuracy, color=MUTED, linewidth=1, linestyle=(0, (4, 2)), label="no codec", zorder=2)
    rest = sorted((one for one in points if not one.is_baseline), key=lambda one: one.ratio)
    for row, point in enumerate(rest):
        axes.errorbar(
            point.accuracy,
            row,
            xerr=point.deviation or None,
            fmt="D" if point.is_published else "o",
            color=stage_color(1) if point.is_published else stage_color(0),
            markersize=6,
            capsize=3,
            zorder=4,
        )
    axes.set_yticks(range(len(rest)), [f"{one.label}  {one.ratio:.3f}" for one in rest], fontsize=8, color=INK)
    axes.set_ylim(-0.7, len(rest) - 0.3)
    axes.plot([], [], "o", color=stage_color(0), label="ours")
    axes.plot([], [], "D", color=stage_color(1), label="sort quantisation")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
