"""The figure of splits: one group of bars per policy, one bar per device, stages in their colors.

time of one     ─────────────── bottleneck            each bar, from the bottom: forward (full color),
micro-batch      ██ ▒▒                                backward (tint), link (hatched); stages that
                 ██ ██ ▒▒ ██                          share a device are stacked
                  0  1  2  3
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.transforms import blended_transform_factory

from stagewright.errors import UsageError
from stagewright.partition import Split, StageCost
from stagewright.report.figures.file import check_figure_path, write_figure
from stagewright.report.figures.style import DASHES, draw_grid, new_figure, time_unit, write_at, write_caption
from stagewright.report.palette import INK, MUTED, stage_color, tint

_GAP = 1.1  # between groups, in bar widths
_BAR = 0.84
_WIDEST = 28.0  # of a row, in bar widths


def plot_split(split: Split, path: str | Path) -> Path:
    return draw_split([split], path)


def draw_split(splits: Iterable[Split], path: str | Path, *, title: str | None = None) -> Path:
    """Draw the splits into a .png, .svg or .pdf file and return its path."""
    path = check_figure_path(path)
    return write_figure(split_figure(tuple(splits), title=title), path)


def split_figure(splits: Sequence[Split], *, title: str | None = None) -> Figure:
    if not splits:
        raise UsageError("there is no split to draw: pass at least one")
    scale_s, unit = time_unit(max(split.bottleneck_s for split in splits))
    rows = _rows(splits)
    extent = max(_extent(row) for row in rows)
    figure = new_figure(max(6.4, 0.38 * extent + 1.4), 1.9 + 3.1 * len(rows), hspace=0.06)
    all_axes = figure.subplots(len(rows), 1, sharey=True, squeeze=False)[:, 0]
    tallest = max(split.bottleneck_s for split in splits) / scale_s
    for axes, row in zip(all_axes, rows, strict=True):
        _draw_row(axes, row, scale_s, unit)
        # A single row is centered; several rows are left-aligned.
        spare = (extent - _content(row)) / 2 if len(rows) == 1 else 0.0
        axes.set_xlim(-0.5 - _GAP / 2 - spare, extent - 0.5 - _GAP / 2 - spare)
        axes.set_ylim(0, tallest * (1.12 + 0.08 * len(rows)) if tallest > 0 else 1)
        axes.set_ylabel(f"time of one micro-batch ({unit})", color=INK)
    all_axes[-1].set_xlabel("stage, by policy", labelpad=26, color=INK)
    all_axes[0].set_title(title or _title(splits), loc="left", color=INK, fontsize=12, fontweight="bold", pad=24)
    write_caption(all_axes[0], _caption(splits[0].num_microbatches), 10)
    _add_legend(figure, splits)
    return figure


def _extent(splits: Sequence[Split]) -> float:
    """Return the width of a row in bar widths; bars of a single group do not get too wide."""
    return max(8.0, _content(splits))


def _content(splits: Sequence[Split]) -> float:
    """Return the width of the groups and the gaps between them."""
    return sum(_group_width(split) + _GAP for split in splits)


def _group_width(split: Split) -> float:
    """Return the width of a group, enough for the text above it."""
    return max(float(len(split.devices)), 3.5)


def _rows(splits: Sequence[Split]) -> list[Sequence[Split]]:
    """Arrange the splits in few legible rows of equal length."""
    num_rows = min(math.ceil(_extent(splits) / _WIDEST), len(splits))
    row_length = math.ceil(len(splits) / num_rows)
    return [splits[start : start + row_length] for start in range(0, len(splits), row_length)]


def _draw_row(axes: Axes, splits: Sequence[Split], scale_s: float, unit: str) -> None:
    left, ticks, labels = 0.0, [], []
    for split in splits:
        inset = (_group_width(split) - len(split.devices)) / 2
        positions = [left + inset + device for device in range(len(split.devices))]
        for device, position in enumerate(positions):
            stages = [stage for stage in split.stages if stage.device == device]
            _draw_device(axes, stages, position, scale_s)
            ticks.append(position)
            labels.append(" + ".join(str(stage.index) for stage in stages))
        _label_group(axes, split, positions[0] - 0.5, positions[-1] + 0.5, scale_s, unit)
        left += _group_width(split) + _GAP
    axes.set_xticks(ticks, labels, fontsize=8, color=MUTED)
    axes.tick_params(axis="x", length=0)
    axes.tick_params(axis="y", colors=MUTED, length=3)
    draw_grid(axes, "y", ("top", "right", "left"))
    axes.spines["bottom"].set_color(MUTED)


def _draw_device(axes: Axes, stages: Sequence[StageCost], position: float, scale_s: float) -> None:
    """Draw one bar: the stacked stages of a device."""
    base = 0.0
    for stage in stages:
        color = stage_color(stage.index)
        forward, backward, link = (value / scale_s for value in (stage.forward_s, stage.backward_s, stage.link_s))
        axes.bar(position, forward, _BAR, bottom=base, color=color, zorder=3)
        axes.bar(position, backward, _BAR, bottom=base + forward, color=tint(color), zorder=3)
        if link > 0:
            # A link that overlaps with compute is drawn next to it.
            overlapped = stage.busy_s < stage.time_s
            width = _BAR / 3 if overlapped else _BAR
            axes.bar(
                position + (_BAR - width) / 2,
                link,
                width,
                bottom=base if overlapped else base + forward + backward,
                facecolor="white",
                edgecolor=color,
                hatch="/////",
                linewidth=0.8,
                zorder=4,
            )
        base += stage.busy_s / scale_s
        if stage is not stages[-1]:
            axes.plot([position - _BAR / 2, position + _BAR / 2], [base, base], color="white", linewidth=1.5, zorder=5)


def _label_group(axes: Axes, split: Split, left: float, right: float, scale_s: float, unit: str) -> None:
    """Draw the bottleneck line, the policy's name below the bars, and its speed-up bound above them."""
    bottleneck = split.bottleneck_s / scale_s
    axes.plot([left, right], [bottleneck, bottleneck], color=INK, linewidth=1.1, linestyle=DASHES, zorder=6)
    middle = (left + right) / 2
    # A white box keeps the grid out of the text.
    style = {"ha": "center", "va": "bottom", "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.8}}
    bound, detail = f"{split.speedup_bound:.2f}×", f"{bottleneck:.3g} {unit}, balance {split.balance:.2f}"
    write_at(axes, bound, (middle, bottleneck), (0, 15), fontsize=11, fontweight="bold", **style)
    write_at(axes, detail, (middle, bottleneck), (0, 4), fontsize=7.5, color=MUTED, **style)
    below = blended_transform_factory(axes.transData, axes.transAxes)
    note = "" if split.fits else "\nexceeds the memory limit"
    axes.text(middle, -0.085, split.policy + note, transform=below, ha="center", va="top", color=INK, fontsize=10)


def _add_legend(figure: Figure, splits: Sequence[Split]) -> None:
    stages = [stage for split in splits for stage in split.stages]
    keys: list[Artist] = [Patch(facecolor=MUTED, label="forward")]
    if any(stage.backward_s > 0 for stage in stages):
        keys.append(Patch(facecolor=tint(MUTED), label="backward"))
    if any(stage.link_s > 0 for stage in stages):
        keys.append(Patch(facecolor="white", edgecolor=MUTED, hatch="/////", label="link"))
    keys.append(Line2D([], [], color=INK, linewidth=1.1, linestyle=DASHES, label="bottleneck"))
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False, fontsize=9, labelcolor=INK)


def _title(splits: Sequence[Split]) -> str:
    num_devices = max(len(split.devices) for split in splits)
    devices = f"{num_devices} device" + ("s" if num_devices != 1 else "")
    return f"{splits[0].model} on {devices}, {'training' if splits[0].training else 'inference'}"


def _caption(num_microbatches: int | None) -> str:
    """Explain the bold numbers."""
    if num_microbatches is None:
        stream = "an endless stream of micro-batches"
    else:
        stream = f"{num_microbatches} micro-batch" + ("es" if num_microbatches != 1 else "")
    return f"bold: speed-up bound over one device with {stream}"
