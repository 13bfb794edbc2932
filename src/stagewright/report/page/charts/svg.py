"""Charts as SVG of any width: horizontal lengths are percentages, text keeps its size.

    label                          text       a bar: its line of text, below it the segments
    ██████████▒▒▒▒▒▒▒      │
    0        10        20        30           ticks at round numbers

Curves are drawn in an inner SVG of 1000 × 1000 that is stretched while strokes are not; labels of the vertical axis
are inside, above its grid lines. Colors are CSS variables, so that one drawing works in light and dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from stagewright.report.page.charts.axis import format_tick, log_ticks, ticks
from stagewright.report.page.sections import BarChart, Line, LineChart, Quantity
from stagewright.report.render.html import clean_text

_ROW_PX = 40
_TEXT_PX = 17
_AXIS_PX = 24
_PLOT_PX = 240
_MAX_LETTERS = 46  # of two texts on one line, at 360 px
_MAX_POINTS = 2000


def clean(text: str) -> str:
    """Escape text for HTML, without characters that files must not contain."""
    return escape(clean_text(str(text)), quote=True)


def bar_svg(chart: BarChart) -> str:
    """Draw the bars, one below the other."""
    low = min([0.0, *(min(part.start, part.end) for bar in chart.bars for part in bar.parts)])
    marks = [bar.mark for bar in chart.bars if bar.mark is not None]
    high = max([*(max(part.start, part.end) for bar in chart.bars for part in bar.parts), *marks, 0.0])
    tick_values = ticks(low, high, chart.quantity)
    span = tick_values[-1] - tick_values[0]
    # On a phone the two texts of a long row do not fit on one line.
    num_lines = [1 if len(bar.label) + len(bar.text) <= _MAX_LETTERS else 2 for bar in chart.bars]
    tops = [_ROW_PX * index + _TEXT_PX * (sum(num_lines[:index]) - index) for index in range(len(num_lines) + 1)]
    bottom = tops[-1]

    def x_percent(value: float) -> float:
        return 100 * (value - tick_values[0]) / span

    parts = [_grid_line(x_percent(value), bottom, format_tick(value, chart.quantity)) for value in tick_values]
    for bar, start, count in zip(chart.bars, tops, num_lines, strict=False):
        top = start + _TEXT_PX * (count - 1)
        parts.append(f'<text class="name" x="0" y="{start + 13}">{clean(bar.label)}</text>')
        parts.append(f'<text class="value" x="100%" y="{top + 13}" text-anchor="end">{clean(bar.text)}</text>')
        for part in bar.parts:
            left, right = sorted((x_percent(part.start), x_percent(part.end)))
            name = f"{part.name}: " if part.name else ""
            hint = part.hint or name + format_tick(part.end - part.start, chart.quantity)
            parts.append(
                f'<rect x="{_percent(left)}" y="{top + 19}" width="{_percent(max(right - left, 0.15))}" height="15" '
                f'fill="var(--{part.paint})"><title>{clean(bar.label)}: {clean(hint)}</title></rect>'
            )
        if bar.mark is not None:
            x = _percent(x_percent(bar.mark))
            hint = clean(f"{chart.mark_name}: {format_tick(bar.mark, chart.quantity)}")
            line = f'<line class="mark" x1="{x}" x2="{x}" y1="{top + 16}" y2="{top + 37}">'
            parts.append(f"{line}<title>{hint}</title></line>")
    return _svg(chart.title, bottom + _AXIS_PX, parts)


def line_svg(chart: LineChart) -> str:
    """Draw the curves."""
    points = [(x, y) for line in chart.lines for x, y in zip(line.x, line.y, strict=True)]
    x_ticks, x_share = _scale([x for x, _ in points], chart.x_log, chart.x_quantity, tight=True)
    y_ticks, y_share = _scale([y for _, y in points], chart.y_log, chart.y_quantity, from_zero=chart.from_zero)
    heights = {value: 16 + _PLOT_PX * (1 - y_share(value)) for value in y_ticks}
    parts = [f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>' for y in heights.values()]
    parts += [
        _grid_line(100 * x_share(value), 16 + _PLOT_PX, format_tick(value, chart.x_quantity), top=16)
        for value in x_ticks
    ]
    parts.append(
        f'<svg x="0" y="16" width="100%" height="{_PLOT_PX}" viewBox="0 0 1000 1000" preserveAspectRatio="none" '
        'overflow="visible">'
    )
    parts += [_curve(line, x_share, y_share) for line in chart.lines]
    parts.append("</svg>")
    for value, y in heights.items():
        text = clean(format_tick(value, chart.y_quantity))
        parts.append(f'<text class="tick halo" x="2" y="{y - 3:.1f}">{text}</text>')
    return _svg(chart.title, 16 + _PLOT_PX + _AXIS_PX, parts)


def _scale(
    values: list[float], log: bool, quantity: Quantity, *, from_zero: bool = False, tight: bool = False
) -> tuple[list[float], Callable[[float], float]]:
    """Return ticks and a map from values to 0 … 1; a `tight` scale ends at the extreme values, not at ticks."""
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = (min(finite), max(finite)) if finite else (1.0, 10.0)
    tick_values = log_ticks(low, high) if log else ticks(min(0.0, low) if from_zero else low, high, quantity)
    first, last = (low, high) if tight and high > low else (tick_values[0], tick_values[-1])
    slack = 1e-9 * (last - first)
    inside = [value for value in tick_values if first - slack <= value <= last + slack]
    if log:
        begin, length = math.log10(first), math.log10(last) - math.log10(first)
        return inside, lambda value: (math.log10(max(value, first)) - begin) / length
    return inside, lambda value: (value - first) / (last - first)


def _curve(line: Line, x_share: Callable[[float], float], y_share: Callable[[float], float]) -> str:
    stride = max(1, math.ceil(len(line.x) / _MAX_POINTS)) if line.style == "line" else 1
    indices = [*range(0, len(line.x), stride)]
    if indices and indices[-1] != len(line.x) - 1:
        indices.append(len(line.x) - 1)
    points = [
        (1000 * x_share(line.x[index]), 1000 * (1 - y_share(line.y[index])))
        for index in indices
        if math.isfinite(line.x[index]) and math.isfinite(line.y[index])
    ]
    style = f'stroke="var(--{line.paint})" vector-effect="non-scaling-stroke" fill="none"'
    if line.style == "dots":
        path = "".join(f"M{_short(x)} {_short(y)}h0" for x, y in points)
        return f'<path class="dots" d="{path}" {style}/>'
    if not points:
        return ""
    path = f"M{_short(points[0][0])} {_short(points[0][1])}"
    for x, y in points[1:]:
        path += f"H{_short(x)}V{_short(y)}" if line.style == "step" else f"L{_short(x)} {_short(y)}"
    dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
    return f'<path class="curve" d="{path}" {style}{dashes}><title>{clean(line.name)}</title></path>'


def _grid_line(percent: float, bottom: float, text: str, top: float = 0) -> str:
    x = _percent(percent)
    anchor = "start" if percent < 1 else "end" if percent > 99 else "middle"
    return (
        f'<line class="grid" x1="{x}" x2="{x}" y1="{top:g}" y2="{bottom:g}"/>'
        f'<text class="tick" x="{x}" y="{bottom + 16:g}" text-anchor="{anchor}">{clean(text)}</text>'
    )


def _svg(title: str, height: int, parts: list[str]) -> str:
    head = f'<svg class="chart" role="img" aria-label="{clean(title)}" width="100%" height="{height}">'
    return f"{head}{''.join(parts)}</svg>"


def _percent(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") + "%"


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
