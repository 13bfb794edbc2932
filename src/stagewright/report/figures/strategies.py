"""The figure of the study *strategies*: speed-up and accuracy of every experiment.

data, 2 workers, 64            ████████████  1.82 ×   95.8 ± 0.04
pipeline, 2 workers, 64 (4)    █████████     1.51 ×   95.9 ± 0.07
data, 4 workers, 128           ▨▨▨▨▨▨▨▨▨▨▨▨  3.10 ×   hatched: forecast
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from stagewright.report.figures.file import write_figure
from stagewright.report.figures.style import DASHES, draw_grid, new_figure, write_at
from stagewright.report.palette import INK, MUTED, stage_color

_ONE: dict[str, Any] = {"color": MUTED, "linewidth": 1, "linestyle": DASHES}
_COLORS = {"data": stage_color(1), "pipeline": stage_color(0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyBar:
    """One experiment."""

    label: str
    strategy: str
    """data or pipeline."""
    speedup: float | None
    """Over the single-device baseline, if known."""
    is_measured: bool
    """Measured with one device per worker, or forecast."""
    accuracy: str
    """Formatted as in tables."""


def draw_strategies(panels: Mapping[str, Sequence[StrategyBar]], path: str | Path, *, title: str) -> Path:
    """Draw one panel per task into a .png, .svg or .pdf file."""
    num_rows = max((len(bars) for bars in panels.values()), default=1)
    figure = new_figure(6.4 * max(1, len(panels)), 1.7 + 0.38 * max(1, num_rows))
    all_axes = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    for axes, (name, bars) in zip(all_axes, panels.items(), strict=False):
        for row, bar in enumerate(bars):
            length = bar.speedup or 0.0
            color = _COLORS.get(bar.strategy, MUTED)
            if bar.is_measured:
                axes.barh(row, length, 0.7, color=color, zorder=3)
            else:
                axes.barh(row, length, 0.7, color="white", edgecolor=color, hatch="///", zorder=3)
            text = "–" if bar.speedup is None else f"{bar.speedup:.2f} ×"
            text += f"   {bar.accuracy} %" if bar.accuracy != "–" else ""
            frame = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # over the line of one device
            write_at(axes, text, (length, row), (5, 0), va="center", fontsize=8.5, bbox=frame)
        axes.axvline(1, **_ONE, zorder=2)
        axes.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize=8.5, color=INK)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.65 * max([1.0, *(bar.speedup or 0.0 for bar in bars)]))
        axes.set_xlabel("speed-up over one device (and accuracy, ± standard deviation)", color=INK)
        axes.set_title(name, loc="left", color=INK, fontsize=10)
        draw_grid(axes, "x")
    kinds = {bar.is_measured for bars in panels.values() for bar in bars}
    patches = {
        True: Patch(facecolor=MUTED, label="measured"),
        False: Patch(facecolor="white", edgecolor=MUTED, hatch="///", label="forecast"),
    }
    keys = [*(patches[kind] for kind in (True, False) if kind in kinds), Line2D([], [], **_ONE, label="one device")]
    figure.legend(handles=keys, loc="outside lower right", ncols=len(keys), frameon=False, fontsize=8.5)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    return write_figure(figure, path)
