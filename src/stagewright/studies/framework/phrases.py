"""Numbers and lists as the sentences of an answer write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def joined(words: Iterable[str], last: str = "and") -> str:
    """Join words: "a", "a and b", "a, b and c"."""
    items = list(words)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} {last} {items[-1]}" if items else ""


def counted(number: int, noun: str) -> str:
    """Write a count with its noun: "1 seed", "3 seeds"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def times(number: float) -> str:
    """Write a ratio: "1.62 ×"; from 100 up without decimals."""
    return f"{number:.0f} ×" if number >= 100 else f"{number:.2f} ×"


def percent(share: float) -> str:
    """Write a share: "12 %"; below 10 % with one decimal, but for "0 %"."""
    text = f"{100 * share:.1f}" if 0 < abs(share) < 0.1 else f"{100 * share:.0f}"
    return f"{text} %".replace("-", "−")


def change(number: float, reference: float) -> str:
    """Write how much more or less a number is than a reference: "12 % more", "3.0 % less", "as much"."""
    relative = number / reference - 1
    if abs(relative) < 0.0005:
        return "as much"
    return f"{percent(abs(relative))} {'more' if relative > 0 else 'less'}"


def signed(points: float) -> str:
    """Write a difference with its sign: "+0.4", "−1.2"."""
    return f"{round(points, 1) + 0.0:+.1f}".replace("-", "−")


def study_command(options: Mapping[str, Any], arguments: str) -> str:
    """Write the command of a study; of the quick one, where this one is quick."""
    return f"stagewright study {arguments}{' --quick' if options.get('quick') else ''}"


def spread(numbers: Sequence[float]) -> str:
    """Write the range of several numbers: "1.58 … 1.66"; empty for one number."""
    return f"{min(numbers):.2f} … {max(numbers):.2f}" if len(numbers) > 1 else ""
