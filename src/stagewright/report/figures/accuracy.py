"""The figure of the study *codecs*: accuracy with each codec, one panel per data set.

bf16    0.500 │        ┊ ├─●─┤       one row per codec with its share of fp32 bytes, smallest at the bottom
block4  0.141 │    ├───●───┤         dots: Stagewright's codecs; diamonds: sort quantization
sort3+1 0.125 │ ├─◇─┤  ┊             dashed: no codec, with its standard deviation
              └─────────── accuracy
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes

from stagewright.report.figures.file import write_figure
from stagewright.report.figures.style import DASHES, draw_grid, new_figure
from stagewright.report.palette import GRID, INK, MUTED, stage_color


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyPoint:
    """Accuracy with one codec."""

    label: str
    ratio: float
    """Bytes sent, relative to sending without a codec."""
    accuracy: float
    """Mean over seeds, in percent."""
    deviation: float
    """Standard deviation over seeds."""
    is_baseline: bool = False
    """Whether no codec is used."""
    is_published: bool = False
    """Whether it is sort quantization."""


def draw_accuracy(
    panels: Mapping[str, Sequence[AccuracyPoint]],
    path: str | Path,
    *,
    title: str,
    measures: Mapping[str, str] | None = None,
) -> Path:
    """Draw one panel per data set into a .png, .svg or .pdf file.

    ``measures``: names of metrics other than accuracy, by panel.
    """
    num_rows = max((len(points) for points in panels.values()), default=0)
    figure = new_figure(5.2 * max(1, len(panels)) + 0.4, 1.6 + 0.3 * num_rows)
    all_axes = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    for axes, (name, points) in zip(all_axes, panels.items(), strict=False):
        _draw_panel(axes, points)
        axes.set_xlabel((measures or {}).get(name, "accuracy (%)"), color=INK)
        axes.set_title(name, loc="left", color=INK, fontsize=10)
    all_axes[0].set_ylabel("codec, share of fp32 bytes", color=INK)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    return write_figure(figure, path)


def _draw_panel(axes: Axes, points: Sequence[AccuracyPoint]) -> None:
    for point in (point for point in points if point.is_baseline):
        low, high = point.accuracy - point.deviation, point.accuracy + point.deviation
        axes.axvline(point.accuracy, color=MUTED, linewidth=1, linestyle=DASHES, label="no codec", zorder=2)
        axes.axvspan(low, high, color=GRID, zorder=1, label="± its standard deviation")
    codecs = sorted((point for point in points if not point.is_baseline), key=lambda point: point.ratio)
    for row, point in enumerate(codecs):
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
    axes.set_yticks(
        range(len(codecs)), [f"{point.label}  {point.ratio:.3f}" for point in codecs], fontsize=8, color=INK
    )
    axes.set_ylim(-0.7, len(codecs) - 0.3)
    axes.plot([], [], "o", color=stage_color(0), label="Stagewright")
    axes.plot([], [], "D", color=stage_color(1), label="sort quantization")
    draw_grid(axes)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
