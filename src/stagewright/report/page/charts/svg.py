"""Charts as SVG that fits any width: lengths across are in percent, text keeps its size.

    label                          text       a bar: its line of text, below it the pieces
    ██████████▒▒▒▒▒▒▒      │
    0        10        20        30           ticks on round numbers

Curves lie in an inner drawing of 1000 × 1000 that is stretched, with strokes that are not; numbers of the vertical axis
stand on its lines, inside. Colours are CSS variables, so one drawing is right in light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from stagewright.report.page.charts.axis import label, log_ticks, ticks
from stagewright.report.page.sections import BarChart, Line, LineChart, Quantity

__all__ = ["bar_svg", "clean", "line_svg"]

_ROW = 40
_LINE = 17
_MOST_LETTERS = 46  # of two texts on one line, at 360 px
_AXIS = 24
_TALL = 240
_MOST_POINTS = 2000


def clean(text: str) -> str:
    """Text for HTML: escaped, without characters that no file may have."""
    plain = "".join(one if one >= " " or one in "\n\t" else "\ufffd" for one in str(text))
    return escape(plain.encode("utf-8", "replace").decode("utf-8"), quote=True)


def bar_svg(chart: BarChart) -> str:
    """The bars, one below the other."""
    low = min([0.0, *(min(part.start, part.end) for bar in chart.bars for part in bar.parts)])
    marks = [bar.mark for bar in chart.bars if bar.mark is not None]
    high = max([*(max(part.start, part.end) for bar in chart.bars for part in bar.parts), *marks, 0.0])
    places = ticks(low, high, chart.quantity)
    span = places[-1] - places[0]
    # Where a phone has no room for both texts on a line, the second goes below the first.
    lines = [1 if len(bar.label) + len(bar.text) <= _MOST_LETTERS else 2 for bar in chart.bars]
    tops = [_ROW * place + _LINE * (sum(lines[:place]) - place) for place in range(len(lines) + 1)]
    bottom = tops[-1]

    def across(value: float) -> float:
        return 100 * (value - places[0]) / span

    parts = [_grid(across(place), bottom, label(place, chart.quantity)) for place in places]
    for bar, start, count in zip(chart.bars, tops, lines, strict=False):
        top = start + _LINE * (count - 1)
        parts.append(f'<text class="name" x="0" y="{start + 13}">{clean(bar.label)}</text>')
        parts.append(f'<text class="value" x="100%" y="{top + 13}" text-anchor="end">{clean(bar.text)}</text>')
        for part in bar.parts:
            left, right = sorted((across(part.start), across(part.end)))
            hint = part.hint or (f"{part.name}: " if part.name else "") + label(part.end - part.start, chart.quantity)
            parts.append(
                f'<rect x="{_percent(left)}" y="{top + 19}" width="{_percent(max(right - left, 0.15))}" height="15" '
                f'fill="var(--{part.paint})"><title>{clean(bar.label)}: {clean(hint)}</title></rect>'
            )
        if bar.mark is not None:
            at = _percent(across(bar.mark))
            hint = clean(f"{chart.mark_name}: {label(bar.mark, chart.quantity)}")
            line = f'<line class="mark" x1="{at}" x2="{at}" y1="{top + 16}" y2="{top + 37}">'
            parts.append(f"{line}<title>{hint}</title></line>")
    return _whole(chart.title, bottom + _AXIS, parts)


def line_svg(chart: LineChart) -> str:
    """The curves."""
    points = [(x, y) for line in chart.lines for x, y in zip(line.x, line.y, strict=True)]
    x_places, across = _scale([x for x, _ in points], chart.x_log, chart.x_quantity, tight=True)
    y_places, upward = _scale([y for _, y in points], chart.y_log, chart.y_quantity, from_zero=chart.from_zero)
    parts = []
    for place in y_places:
        at = 16 + _TALL * (1 - upward(place))
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{at:.1f}" y2="{at:.1f}"/>')
    parts += [_grid(100 * across(place), 16 + _TALL, label(place, chart.x_quantity), top=16) for place in x_places]
    parts.append(
        f'<svg x="0" y="16" width="100%" height="{_TALL}" viewBox="0 0 1000 1000" preserveAspectRatio="none" '
        'overflow="visible">'
    )
    for line in chart.lines:
        parts.append(_curve(line, across, upward))
    parts.append("</svg>")
    for place in y_places:
        at = 16 + _TALL * (1 - upward(place))
        parts.append(f'<text class="tick halo" x="2" y="{at - 3:.1f}">{clean(label(place, chart.y_quantity))}</text>')
    return _whole(chart.title, 16 + _TALL + _AXIS, parts)


def _scale(
    values: list[float], log: bool, quantity: Quantity, *, from_zero: bool = False, tight: bool = False
) -> tuple[list[float], Callable[[float], float]]:
    """Ticks, and the place of a value between 0 and 1; `tight` ends where the values do, not at a tick."""
    finite = [one for one in values if math.isfinite(one) and (one > 0 or not log)]
    low, high = (min(finite), max(finite)) if finite else (1.0, 10.0)
    places = log_ticks(low, high) if log else ticks(min(0.0, low) if from_zero else low, high, quantity)
    first, last = (low, high) if tight and high > low else (places[0], places[-1])
    slack = 1e-9 * (last - first)
    inside = [one for one in places if first - slack <= one <= last + slack]
    if log:
        begin, length = math.log10(first), math.log10(last) - math.log10(first)
        return inside, lambda value: (math.log10(max(value, first)) - begin) / length
    return inside, lambda value: (value - first) / (last - first)


def _curve(line: Line, across: Callable[[float], float], upward: Callable[[float], float]) -> str:
    every = max(1, math.ceil(len(line.x) / _MOST_POINTS)) if line.style == "line" else 1
    kept = [*range(0, len(line.x), every)]
    if kept and kept[-1] != len(line.x) - 1:
        kept.append(len(line.x) - 1)
    places = [
        (1000 * across(line.x[at]), 1000 * (1 - upward(line.y[at])))
        for at in kept
        if math.isfinite(line.x[at]) and math.isfinite(line.y[at])
    ]
    style = f'stroke="var(--{line.paint})" vector-effect="non-scaling-stroke" fill="none"'
    if line.style == "dots":
        path = "".join(f"M{_short(x)} {_short(y)}h0" for x, y in places)
        return f'<path class="dots" d="{path}" {style}/>'
    if not places:
        return ""
    path = f"M{_short(places[0][0])} {_short(places[0][1])}"
    for x, y in places[1:]:
        path += f"H{_short(x)}V{_short(y)}" if line.style == "step" else f"L{_short(x)} {_short(y)}"
    dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
    return f'<path class="curve" d="{path}" {style}{dashes}><title>{clean(line.name)}</title></path>'


def _grid(across: float, bottom: float, text: str, top: float = 0) -> str:
    at = _percent(across)
    anchor = "start" if across < 1 else "end" if across > 99 else "middle"
    return (
        f'<line class="grid" x1="{at}" x2="{at}" y1="{top:g}" y2="{bottom:g}"/>'
        f'<text class="tick" x="{at}" y="{bottom + 16:g}" text-anchor="{anchor}">{clean(text)}</text>'
    )


def _whole(title: str, height: int, parts: list[str]) -> str:
    head = f'<svg class="chart" role="img" aria-label="{clean(title)}" width="100%" height="{height}">'
    return f"{head}{''.join(parts)}</svg>"


def _percent(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") + "%"


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
