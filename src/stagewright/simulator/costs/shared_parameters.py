"""Parameters that two stages both hold, like a tied embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagewright.profiler.profile import Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParameter:
    """Parameters that two stages both hold, like a tied embedding."""

    unit: int
    """The first unit that holds them."""
    earlier: int
    """That unit's stage."""
    later: int
    """The later stage."""
    num_bytes: int


def shared_between_stages(parameters: Sequence[Amount], bounds: Sequence[tuple[int, int]]) -> list[SharedParameter]:
    """Return the parameters held by two stages, given the first and last unit of each stage."""
    stage_of = {unit: stage for stage, (first, last) in enumerate(bounds) for unit in range(first, last + 1)}
    shared = [
        SharedParameter(unit=before, earlier=stage_of[before], later=stage_of[unit], num_bytes=size)
        for unit, amount in enumerate(parameters)
        for before, size in amount.shares
    ]
    return [parameter for parameter in shared if parameter.earlier != parameter.later]
