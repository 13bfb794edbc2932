"""Round numbers along an axis, and how they are written."""

from __future__ import annotations

import math

from stagewright.quantity import format_bytes, format_count, format_s
from stagewright.report.page.sections import Quantity

__all__ = ["label", "log_ticks", "ticks"]

_MOST_DECADES = 6


def ticks(low: float, high: float, quantity: Quantity = "number", count: int = 5) -> list[float]:
    """About `count` round numbers from at most `low` to at least `high`; bytes are round in powers of two.

    A range too small for its place, where floats could not tell numbers in it apart, is none.
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high - low <= 1e-9 * abs(low):
        high = low + (abs(low) or 1.0)
    rough = (high - low) / max(1, count - 1)
    if quantity == "bytes" and rough >= 1:
        power = 2.0 ** math.floor(math.log2(rough))
        step = power if power >= rough else 2 * power
    else:
        power = 10.0 ** math.floor(math.log10(rough))
        factors = (1, 2, 5, 10) if quantity == "count" else (1, 2, 2.5, 5, 10)
        step = next(factor * power for factor in factors if factor * power >= rough * (1 - 1e-9))
        step = max(1.0, step) if quantity == "count" else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [place * step for place in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around the range; with 2 and 5 between them where these are few."""
    first = math.floor(math.log10(low) + 1e-9)
    last = max(math.ceil(math.log10(high) - 1e-9), first + 1)
    every = math.ceil((last - first) / _MOST_DECADES)
    powers = [first + every * place for place in range(math.ceil((last - first) / every) + 1)]
    if len(powers) > 3:
        return [10.0**power for power in powers]
    found = [factor * 10.0**power for power in powers[:-1] for factor in (1, 2, 5)] + [10.0 ** powers[-1]]
    begin = max(place for place, one in enumerate(found) if one <= low * (1 + 1e-8))
    end = min(place for place, one in enumerate(found) if one >= high * (1 - 1e-8))
    return found[begin : max(end, begin + 1) + 1]


def label(value: float, quantity: Quantity) -> str:
    """A number as it stands at an axis."""
    if quantity == "seconds":
        return _short(format_s(value))
    if quantity == "bytes":
        return _short(format_bytes(value))
    if quantity == "times":
        return f"{value:g} ×"
    if quantity == "share":
        return f"{100 * value:g} %"
    return _short(format_count(value)) if abs(value) >= 10_000 else f"{value:.6g}"


def _short(text: str) -> str:
    """Without zeros at the end: 20.0 ms is 20 ms."""
    number, space, unit = text.partition(" ")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + space + unit
