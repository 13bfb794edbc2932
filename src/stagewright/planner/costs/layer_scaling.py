"""Costs of a model with more layers than were measured, by repeating identical blocks."""

from __future__ import annotations

import re
from dataclasses import replace

from stagewright.errors import UsageError
from stagewright.planner.costs.measure import ModelCosts
from stagewright.profiler.profile import Amount, Profile, UnitProfile


def with_num_layers(measured: ModelCosts, num_layers: int) -> ModelCosts:
    """Return the costs with another number of blocks, all like the middle one except the first, next to the stem."""
    units = measured.profile.units
    blocks = [index for index, unit in enumerate(units) if unit.block is not None]
    if not blocks or blocks != list(range(blocks[0], blocks[-1] + 1)):
        raise UsageError(f"{measured.profile.model!r} has no contiguous blocks to repeat")
    if len({units[index].block for index in blocks}) < len(blocks):
        raise UsageError(
            f"{measured.profile.model!r} was measured with several units per block, which can't be repeated: "
            "use --units auto"
        )
    first, last = blocks[0], blocks[-1]
    middle = (first + last + 1) // 2
    scaled: list[UnitProfile] = list(units[:first])
    for number in range(num_layers):
        template, name = first if number == 0 else middle, _block_name(units[first].name, number)
        block = _shift_shares(units[template], first + number - template, first)
        scaled.append(replace(block, name=name, block=name))
    scaled += [_shift_shares(unit, num_layers - len(blocks), first) for unit in units[last + 1 :]]
    tensor = None
    if measured.tensor is not None:
        traffic = measured.tensor
        chained = traffic[first].sequence.continues
        divided = [
            replace(block, sequence=replace(block.sequence, continues=chained and number < num_layers - 1))
            for number, block in enumerate([traffic[middle]] * num_layers)
        ]
        tensor = (*traffic[:first], *divided, *traffic[last + 1 :])
    experts = None
    if measured.experts is not None:
        held = measured.experts
        experts = (*held[:first], *[held[middle]] * num_layers, *held[last + 1 :])
    forward = sum(unit.forward.median_s for unit in scaled)
    backward = sum(unit.backward_s for unit in scaled)
    longer = (forward + backward) / (sum(unit.total_s for unit in units) or 1.0)
    profile: Profile = replace(
        measured.profile,
        first_pass_s=longer * measured.profile.first_pass_s,
        following_pass_s=longer * measured.profile.following_pass_s,
        units=tuple(scaled),
        whole_forward=replace(measured.profile.whole_forward, median_s=forward),
        whole_backward=replace(measured.profile.whole_backward, median_s=backward),
        whole_macs=measured.profile.whole_macs + sum(unit.macs for unit in scaled) - sum(unit.macs for unit in units),
    )
    return replace(measured, profile=profile, tensor=tensor, experts=experts, whole=None)


def _block_name(name: str, number: int) -> str:
    """Return the module name of a block: transformer.h.7 for transformer.h.0 and 7."""
    return re.sub(r"\d+(?=\D*$)", str(number), name) if re.search(r"\d", name) else f"{name}.{number}"


def _shift_shares(unit: UnitProfile, offset: int, first: int) -> UnitProfile:
    """Move a unit to another index: shares with earlier blocks move along if these exist, shares with the stem stay."""

    def shift(amount: Amount) -> Amount:
        shares = [
            (index if index < first else index + offset, size)
            for index, size in amount.shares
            if index < first or index + offset >= first
        ]
        return Amount(total=amount.total, shares=tuple(sorted(shares)))

    attention = unit.attention
    return replace(
        unit,
        attention=attention and replace(attention, saved_bytes=shift(attention.saved_bytes)),
        parameters=shift(unit.parameters),
        parameter_bytes=shift(unit.parameter_bytes),
        saved_bytes=shift(unit.saved_bytes),
    )
