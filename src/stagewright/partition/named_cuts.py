"""Cuts by name: "encoder.layer.3" cuts after that unit, or after the last unit of that block."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.errors import SplitError, UnknownName
from stagewright.profiler.profile import Profile


def cuts_by_name(profile: Profile, names: Sequence[str]) -> tuple[int, ...]:
    """Return the indices of the units to cut after, in order; the names may be in any order."""
    after: dict[str, int] = {}
    for index, unit in enumerate(profile.units):
        if unit.block is not None:
            after[unit.block] = index
    # A unit's name takes precedence over a block of the same name (a block that is one unit, called twice).
    after.update({unit.name: index for index, unit in enumerate(profile.units)})
    cuts: dict[int, str] = {}
    for name in names:
        if name not in after:
            raise UnknownName("unit or block", name, after)
        index = after[name]
        if index == len(profile.units) - 1:
            raise SplitError(
                f"{name!r} is the last unit of {profile.model!r}, so there is nothing to cut after it: leave it out"
            )
        if index in cuts:
            raise SplitError(f"{name!r} and {cuts[index]!r} are the same cut of {profile.model!r}: leave one out")
        cuts[index] = name
    return tuple(sorted(cuts))
