"""The look that all figures share."""

from __future__ import annotations

from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stagewright.report.palette import GRID, INK, MUTED

DASHES = (0, (4, 2))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_SIZES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes"))


def new_figure(width: float, height: float, **layout: Any) -> Figure:
    """Return an empty figure that makes room for all labels."""
    figure = Figure(figsize=(width, height), dpi=160)
    figure.set_layout_engine("constrained", **layout)
    return figure


def draw_grid(
    axes: Axes, lines: Literal["both", "x", "y"] = "both", hidden: tuple[str, ...] = ("top", "right")
) -> None:
    """Draw grid lines behind the data, and hide sides of the frame."""
    axes.grid(axis=lines, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in hidden:
        axes.spines[side].set_visible(False)


def write_at(axes: Axes, text: str, position: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    """Write text at an offset, in points, from a position."""
    axes.annotate(text, position, xytext=offset, textcoords="offset points", **{"color": INK, **style})


def write_caption(axes: Axes, text: str, height: float = 6) -> None:
    """Write a line between the title and the axes."""
    write_at(axes, text, (0, 1), (0, height), xycoords="axes fraction", color=MUTED, fontsize=9)


def time_unit(longest_s: float) -> tuple[float, str]:
    """Return the unit for times up to the longest."""
    return next((scale for scale in _TIMES if longest_s >= scale[0]), _TIMES[-1])


def size_unit(peak: int) -> tuple[float, str]:
    """Return the unit for sizes up to the peak."""
    return next((scale for scale in _SIZES if peak >= scale[0]), _SIZES[-1])
