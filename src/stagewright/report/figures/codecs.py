"""The figure of a codec benchmark: error against size, and transfer speed-up against link speed.

error │ · bf16                         gain │ ╲            block4
      │      · block8                       │  ╲╲____
      │             · block4              1 │────╲╲──────  below this line a codec is slower
      └──────────────── size                └──────────── link, log
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes

from stagewright.engine.jobs.codec_bench import CodecBench, CodecRow
from stagewright.report.figures.file import write_figure
from stagewright.report.figures.style import draw_grid, new_figure, write_at
from stagewright.report.palette import GRID, INK, MUTED, stage_color
from stagewright.report.tables.codecs import format_link

_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINKS = [10.0**power / 8 for power in (7 + index / 10 for index in range(61))]  # 10 Mb/s to 10 Tb/s


def draw_codecs(bench: CodecBench, path: str | Path) -> Path:
    """Draw the first cut of a benchmark into a .png, .svg or .pdf file and return its path."""
    cut = bench.rows[0].cut
    rows = [row for row in bench.rows if row.cut == cut]
    names = list(dict.fromkeys(row.cost.codec for row in rows))
    figure = new_figure(11.5, 4.8, wspace=0.06)
    left, right = figure.subplots(1, 2)
    for index, name in enumerate(names):
        color, mark = stage_color(index), _MARKS[index // 8 % len(_MARKS)]
        for row in rows:
            if row.cost.codec == name:
                _draw_point(left, row, color, mark)
        forward = next(row for row in rows if row.cost.codec == name)
        gains = [forward.cost.raw_bytes / rate / forward.cost.transfer_s(rate) for rate in _LINKS]
        bits, dashes = [8 * rate for rate in _LINKS], ("-", "--")[index // 8 % 2]
        right.plot(bits, gains, color=color, label=name, linewidth=1.6, linestyle=dashes)
    left.set_yscale("log")
    left.set_xlabel("bytes sent, relative to the raw tensor", color=INK)
    left.set_ylabel("relative error (filled: activations, open: gradients)", color=INK)
    right.set_xscale("log")
    right.set_yscale("log")
    right.axhline(1.0, color=INK, linewidth=1.0)
    right.set_ylim(bottom=0.05)
    right.axhspan(0.05, 1.0, color=GRID, alpha=0.6, zorder=0)
    right.text(_LINKS[1] * 8, 0.9, "slower", color=MUTED, va="top", fontsize=9)
    ticks = [10.0**power for power in range(7, 14)]
    right.set_xticks(ticks, [format_link(bits / 8) for bits in ticks], fontsize=8)
    right.set_xlabel("link bandwidth", color=INK)
    right.set_ylabel("transfer speed-up of activations", color=INK)
    right.legend(fontsize=8, frameon=False, ncols=2, loc="upper right")
    for axes in (left, right):
        draw_grid(axes)
        axes.tick_params(colors=MUTED)
    left.set_title(f"{bench.model} after {cut}, {bench.device}", loc="left", color=INK, fontsize=12, fontweight="bold")
    return write_figure(figure, path)


def _draw_point(axes: Axes, row: CodecRow, color: str, mark: str) -> None:
    if row.cost.error <= 0:
        return
    face = "none" if row.backward else color
    axes.scatter([row.cost.ratio], [row.cost.error], color=color, facecolors=face, marker=mark, s=44)
    if not row.backward:
        write_at(axes, row.cost.codec, (row.cost.ratio, row.cost.error), (6, 4), fontsize=8, color=MUTED)
