"""A model with more layers than were measured: blocks that are all alike are repeated."""

from __future__ import annotations

from dataclasses import replace

from stagewright.errors import UsageError
from stagewright.planner.measure import MeasuredModel
from stagewright.profile.value import Amount, Profile, UnitProfile

__all__ = ["grown_layers"]


def grown_layers(measured: MeasuredModel, num_layers: int) -> MeasuredModel:
    """The same model with another number of blocks, each like the middle one."""
    units = measured.profile.units
    blocks = [index for index, unit in enumerate(units) if unit.block is not None]
    if not blocks or blocks != list(range(blocks[0], blocks[-1] + 1)):
        raise UsageError(f"{measured.profile.model!r} has no run of blocks that could be made longer")
    first, last = blocks[0], blocks[-1]
    middle = (first + last + 1) // 2
    made: list[UnitProfile] = list(units[:first])
    for number in range(num_layers):
        made.append(_moved(units[middle], f"layer {number}", first + number - middle))
    added = num_layers - len(blocks)
    made += [_moved(unit, unit.name, added, kept_until=first) for unit in units[last + 1 :]]
    tensor = None
    if measured.tensor is not None:
        one = measured.tensor
        tensor = (*one[:first], *[one[middle]] * num_layers, *one[last + 1 :])
    forward = sum(unit.forward.median_s for unit in made)
    backward = sum(unit.backward_s for unit in made)
    profile: Profile = replace(
        measured.profile,
        units=tuple(made),
        whole_forward=replace(measured.profile.whole_forward, median_s=forward),
        whole_backward=replace(measured.profile.whole_backward, median_s=backward),
    )
    return replace(measured, profile=profile, tensor=tensor, whole=None)


def _moved(unit: UnitProfile, name: str, by: int, kept_until: int | None = None) -> UnitProfile:
    """A unit at another place: what it shares with the units before it moves along; with the stem it stays."""

    def amount(one: Amount) -> Amount:
        shares = [
            (index if kept_until is not None and index < kept_until else max(0, index + by), size)
            for index, size in one.shares
        ]
        return Amount(total=one.total, shares=tuple(sorted(shares)))

    return replace(
        unit,
        name=name,
        parameters=amount(unit.parameters),
        parameter_bytes=amount(unit.parameter_bytes),
        kept_bytes=amount(unit.kept_bytes),
    )
