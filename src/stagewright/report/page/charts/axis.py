"""Axis ticks: round numbers and their labels."""

from __future__ import annotations

import math

from stagewright.quantity import format_bytes, format_count, format_s
from stagewright.report.page.sections import Quantity

_MAX_DECADES = 6


def ticks(low: float, high: float, quantity: Quantity = "number", count: int = 5) -> list[float]:
    """Return about `count` round numbers that cover the range; bytes are round in powers of two.

    A range that is empty, or too small for floats at its magnitude, is widened.
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
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten that cover the range, with 2 and 5 in between where there are few."""
    first = math.floor(math.log10(low) + 1e-9)
    last = max(math.ceil(math.log10(high) - 1e-9), first + 1)
    stride = math.ceil((last - first) / _MAX_DECADES)
    powers = [first + stride * index for index in range(math.ceil((last - first) / stride) + 1)]
    if len(powers) > 3:
        return [10.0**power for power in powers]
    values = [factor * 10.0**power for power in powers[:-1] for factor in (1, 2, 5)] + [10.0 ** powers[-1]]
    begin = max(index for index, value in enumerate(values) if value <= low * (1 + 1e-8))
    end = min(index for index, value in enumerate(values) if value >= high * (1 - 1e-8))
    return values[begin : max(end, begin + 1) + 1]


def format_tick(value: float, quantity: Quantity) -> str:
    """Format a number for an axis."""
    if quantity == "seconds":
        return _strip_zeros(format_s(value))
    if quantity == "bytes":
        return _strip_zeros(format_bytes(value))
    if quantity == "times":
        return f"{value:g} ×"
    if quantity == "share":
        return f"{100 * value:g} %"
    return _strip_zeros(format_count(value)) if abs(value) >= 10_000 else f"{value:.6g}"


def _strip_zeros(text: str) -> str:
    """Remove trailing zeros: 20.0 ms becomes 20 ms."""
    number, space, unit = text.partition(" ")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + space + unit
