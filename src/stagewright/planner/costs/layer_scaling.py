"""A model with more layers than were measured: blocks that are all alike are repeated."""

from __future__ import annotations

import re
from dataclasses import replace

from stagewright.errors import UsageError
from stagewright.planner.costs.measure import ModelCosts
from stagewright.profiler.profile import Amount, Profile, UnitProfile

__all__ = ["with_num_layers"]


def with_num_layers(measured: ModelCosts, num_layers: int) -> ModelCosts:
    """The same model with another number of blocks, each like the middle one; the first stays, it follows the stem."""
    units = measured.profile.units
    blocks = [index for index, unit in enumerate(units) if unit.block is not None]
    if not blocks or blocks != list(range(blocks[0], blocks[-1] + 1)):
        raise UsageError(f"{measured.profile.model!r} has no run of blocks that could be made longer")
    if len({units[index].block for index in blocks}) < len(blocks):
        raise UsageError(
            f"{measured.profile.model!r} was measured in blocks of several units, which can't be made more: "
            "use --units auto"
        )
    first, last = blocks[0], blocks[-1]
    middle = (first + last + 1) // 2
    made: list[UnitProfile] = list(units[:first])
    for number in range(num_layers):
        like, name = first if number == 0 else middle, _numbered(units[first].name, number)
        made.append(replace(_moved(units[like], first + number - like, first), name=name, block=name))
    made += [_moved(unit, num_layers - len(blocks), first) for unit in units[last + 1 :]]
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
        whole_macs=measured.profile.whole_macs + sum(unit.macs for unit in made) - sum(unit.macs for unit in units),
    )
    return replace(measured, profile=profile, tensor=tensor, whole=None)


def _numbered(name: str, number: int) -> str:
    """The name that the model itself gives to that block: transformer.h.7 for transformer.h.0 and 7."""
    return re.sub(r"\d+(?=\D*$)", str(number), name) if re.search(r"\d", name) else f"{name}.{number}"


def _moved(unit: UnitProfile, by: int, first: int) -> UnitProfile:
    """A unit at another place: what it shares with blocks before it moves along, as far as there are; with the stem
    it stays."""

    def amount(one: Amount) -> Amount:
        shares = [
            (index if index < first else index + by, size)
            for index, size in one.shares
            if index < first or index + by >= first
        ]
        return Amount(total=one.total, shares=tuple(sorted(shares)))

    return replace(
        unit,
        parameters=amount(unit.parameters),
        parameter_bytes=amount(unit.parameter_bytes),
        saved_bytes=amount(unit.saved_bytes),
    )
