"""Pieces of the sentences in which studies answer: numbers and lists as people write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["joined", "percent", "ratio", "spread", "times"]


def joined(words: Iterable[str], last: str = "and") -> str:
    """ "a", "a and b", "a, b and c"."""
    found = list(words)
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} {last} {found[-1]}" if found else ""


def times(number: float) -> str:
    """A speed-up: "1.62 ×"."""
    return f"{number:.2f} ×"


def percent(share: float) -> str:
    """A share: "12 %"; small ones keep a digit."""
    text = f"{100 * share:.1f}" if abs(share) < 0.1 else f"{100 * share:.0f}"
    return f"{text} %".replace("-", "−")


def ratio(number: float, other: float) -> str:
    """How much more or less one number is than another: "12 % more", "3.0 % less", "as much"."""
    change = number / other - 1
    if abs(change) < 0.0005:
        return "as much"
    return f"{percent(abs(change))} {'more' if change > 0 else 'less'}"


def spread(numbers: Sequence[float]) -> str:
    """The range of several numbers: "1.58 … 1.66"; empty where there is one."""
    return f"{min(numbers):.2f} … {max(numbers):.2f}" if len(numbers) > 1 else ""
