"""The figure of the study *stages*: speed-up against the number of stages, measured and forecast.

speed-up   ╱ n                one panel per mode; filled dots are measured, with their range;
  │      ╱   ◇ published      rings are forecast: this machine lacks the devices
  │    ● ○
  └──── stages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagewright.report.figures.file import write_figure
from stagewright.report.figures.style import DASHES, draw_grid, new_figure
from stagewright.report.palette import INK, MUTED, stage_color

_OFFSET = 0.07  # between policies, so that their dots do not overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupPoint:
    """One dot."""

    policy: str
    """The policies that give this split."""
    num_stages: int
    speedup: float
    """Over the single-device baseline."""
    low: float
    """Minimum over rounds."""
    high: float
    """Maximum over rounds."""
    is_measured: bool
    """Measured or forecast."""


def draw_speedups(
    panels: Mapping[str, Sequence[SpeedupPoint]], published: Mapping[int, float], path: str | Path, *, title: str
) -> Path:
    """Draw one panel per mode into a .png, .svg or .pdf file; published values are shown for inference."""
    figure = new_figure(4.6 * max(1, len(panels)) + 0.6, 4.2)
    all_axes = figure.subplots(1, max(1, len(panels)), squeeze=False, sharey=True)[0]
    for axes, (mode, points) in zip(all_axes, panels.items(), strict=False):
        is_compared = mode == "inference" and bool(published)
        counts = sorted({point.num_stages for point in points} | {1} | (set(published) if is_compared else set()))
        axes.plot(counts, counts, color=MUTED, linewidth=1, linestyle=DASHES, label="ideal: n stages, n ×", zorder=2)
        policies = list(dict.fromkeys(point.policy for point in points))
        for index, policy in enumerate(policies):
            color, shift = stage_color(index), _OFFSET * (index - (len(policies) - 1) / 2)
            is_named = False
            for point in (point for point in points if point.policy == policy):
                axes.errorbar(
                    point.num_stages + shift,
                    point.speedup,
                    yerr=[[point.speedup - point.low], [point.high - point.speedup]] if point.is_measured else None,
                    fmt="o",
                    color=color,
                    markerfacecolor=color if point.is_measured else "white",
                    markersize=6,
                    capsize=3,
                    label=None if is_named else policy,
                    zorder=4,
                )
                is_named = True
        if is_compared:
            axes.plot(
                list(published),
                list(published.values()),
                "D",
                color=INK,
                markerfacecolor="white",
                markersize=5,
                label="published, 4 machines",
                zorder=3,
            )
        axes.set_title(mode, loc="left", color=INK, fontsize=10)
        axes.set_xlabel("stages", color=INK)
        axes.set_xticks(counts)
        axes.set_xlim(0.7, max([2, *counts]) + 0.3)
        axes.set_ylim(bottom=0)
        draw_grid(axes, "y")
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    has_forecasts = any(not point.is_measured for points in panels.values() for point in points)
    rings = " (rings: forecast)" if has_forecasts else ""
    all_axes[0].set_ylabel(f"speed-up over one device{rings}", color=INK)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    return write_figure(figure, path)
