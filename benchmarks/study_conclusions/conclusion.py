"""Conclusions of a study, and whether those of two runs contradict each other.

subject                              first     second     outcome
inference, 2 stages: blocks or macs  blocks    blocks     same
                                     blocks    None       one can't tell
                                     None      None       neither can tell
                                     blocks    macs       contradiction
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Conclusions: TypeAlias = dict[str, str | None]
"""By subject; None: the study says that it can't be told, or says nothing."""
Outcome: TypeAlias = Literal["same", "one can't tell", "neither can tell", "contradiction"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two runs of a study conclude about one subject."""

    subject: str
    first: str | None
    second: str | None

    @property
    def outcome(self) -> Outcome:
        if self.first is None and self.second is None:
            return "neither can tell"
        if self.first is None or self.second is None:
            return "one can't tell"
        return "same" if self.first == self.second else "contradiction"


def compare(
    first: Mapping[str, str | None], second: Mapping[str, str | None], subjects: tuple[str, ...] | None = None
) -> Iterator[Comparison]:
    """Compare two runs of a study, subject by subject; a subject that only one of them has is unknown to the other."""
    for subject in subjects or tuple(dict.fromkeys((*first, *second))):
        yield Comparison(subject=subject, first=first.get(subject), second=second.get(subject))


def above_or_below(low: float, high: float, margin: float) -> str | None:
    """Say whether ratios from `low` to `high` are above 1 ("yes"), below ("no"), or within the margin of it (None)."""
    if low > 1 + margin:
        return "yes"
    return "no" if high < 1 / (1 + margin) else None
