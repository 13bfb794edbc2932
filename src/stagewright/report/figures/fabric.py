"""The figure of a fabric run: the distribution of trial times, and the trials in order.

share of trials ≤ t                       t of each trial
1 ─        ╭──────                        │    ·        ·
          ╱                               │ ···  ····  · ··
0 ───────╯                                │
   t, logarithmic                            trial
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from stagewright.errors import UsageError
from stagewright.report.figures.file import check_figure_path, write_figure
from stagewright.report.figures.style import draw_grid, new_figure
from stagewright.report.palette import INK, MUTED, stage_color
from stagewright.report.tables.fabric import layer_label, select_layers

_LEGEND_CHARACTERS = 140  # in a row of the legend
_MAX_LAYERS = 8  # more lines are not distinguishable


def draw_fabric(
    result: Mapping[str, Any], times_s: Sequence[npt.NDArray[np.float64]], path: str | Path, *, title: str | None = None
) -> Path:
    """Draw a run into a .png, .svg or .pdf file and return its path; `times_s` has the trials of each layer."""
    path = check_figure_path(path)
    return write_figure(fabric_figure(result, times_s, title=title), path)


def fabric_figure(
    result: Mapping[str, Any], times_s: Sequence[npt.NDArray[np.float64]], *, title: str | None = None
) -> Figure:
    layers = [(layer, times) for layer, times in zip(result["layers"], times_s, strict=True) if len(times)]
    if not layers:
        raise UsageError("no trial was completed, so there is nothing to draw")
    chosen = select_layers(layers, _MAX_LAYERS)
    figure = new_figure(11.0, 4.6, wspace=0.05)
    distribution, sequence = figure.subplots(1, 2)
    for index, (_, times) in enumerate(chosen):
        color = stage_color(index)
        ordered = np.sort(times) * 1e3
        distribution.step(
            ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post", color=color, linewidth=1.6
        )
        sequence.plot(
            np.arange(len(times)), times * 1e3, ".", color=color, markersize=3.0 if len(times) < 3000 else 1.5
        )
    _style(distribution, sequence)
    most = max(len(times) for _, times in chosen)
    sequence.set_xlim(-0.05 * most - 0.5, 1.05 * most - 0.5)
    sequence.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    distribution.set_title("cumulative distribution of trial times", loc="left", fontsize=10, color=INK)
    sequence.set_title("each trial, in order", loc="left", fontsize=10, color=INK)
    title = title or f"{result['workload']}: {result['ranks']} ranks, {result['trials']} trials, {result['engine']}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    keys = [
        Line2D([], [], color=stage_color(index), linewidth=2.2, label=layer_label(layer))
        for index, (layer, _) in enumerate(chosen)
    ]
    # Buckets of a large model have long names: fewer columns, so that the legend stays within the figure.
    columns = _LEGEND_CHARACTERS // (max(len(str(key.get_label())) for key in keys) + 8)
    columns = max(1, min(4, len(keys), columns))
    figure.legend(handles=keys, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return figure


def _style(distribution: Axes, sequence: Axes) -> None:
    distribution.set_xscale("log")
    sequence.set_yscale("log")
    distribution.set_xlabel("time (ms)", color=INK)
    distribution.set_ylabel("share of trials", color=INK)
    distribution.set_ylim(0, 1.02)
    sequence.set_xlabel("trial", color=INK)
    sequence.set_ylabel("time (ms)", color=INK)
    for axis in (distribution.xaxis, sequence.yaxis):
        low, high = axis.get_view_interval()
        # Label 2 and 5 where the times span little more than a decade.
        is_narrow = high / max(low, 1e-9) < 30
        axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0) if is_narrow else (1.0,)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    for axes in (distribution, sequence):
        draw_grid(axes)
        axes.tick_params(colors=MUTED)
        for side in ("bottom", "left"):
            axes.spines[side].set_color(MUTED)
