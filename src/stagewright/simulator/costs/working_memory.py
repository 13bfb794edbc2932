"""Memory that operators need while a stage runs, beside what is held before and after: an allocator counts it, too.

    forward    of unit k    what the units before it kept      + what it takes above its start (results among it)
    backward   of unit k    − what the units behind it kept, + the gradients that they made, + the gradient of its
                              results + what it takes above its start
    … for inputs alone      nothing is let go yet, and no gradient of a weight is made
    sharded    forward      + its parameters twice: gathered as one, and each for itself
               backward     + its parameters, those of the next in line as one, and gradients of the last as one

Units are measured alone, each with its rise above the memory at its start; here they are put one after the other. A CPU
counts its own tensors only: in an inference those that operations make; in training what is kept, and all of this is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagewright.profiler.profile import UnitProfile
from stagewright.simulator.costs.overheads import ModelOverheads

__all__ = ["NO_WORKING_MEMORY", "StageWorkingMemory", "stage_working_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWorkingMemory:
    """How far memory rises above a stage's start while it runs, for one micro-batch of the profiled size."""

    forward_bytes: int = 0
    """Forward."""
    first_backward_bytes: int = 0
    """The first backward of a step, which makes the parameters' gradients."""
    later_backward_bytes: int = 0
    """Every later one, which adds to them."""
    input_backward_bytes: int = 0
    """The first half of one in two halves."""
    weight_backward_bytes: int = 0
    """… and its second half, where gradients are there already: those of one unit, before they are added, and what they
    are made from."""


NO_WORKING_MEMORY = StageWorkingMemory()


def stage_working_memory(
    units: Sequence[UnitProfile],
    first: int,
    last: int,
    terms: ModelOverheads,
    *,
    recomputed: bool,
    training: bool,
    held_share: float = 1.0,
    gathered: Sequence[int] = (),
) -> StageWorkingMemory:
    """The work of the stage of units first … last.

    ``recomputed``: forward keeps nothing inside the stage, and backward begins when all of it is there again, after the
    loss has gone backward. ``held_share``: what stays of a unit's gradients when it is done, where they are sharded.
    ``gathered``: bytes of each unit that is gathered alone when it runs, 0 for one that is not.
    """
    own = units[first : last + 1]
    if not any(unit.forward_working_bytes for unit in own):
        return NO_WORKING_MEMORY

    ends = last == len(units) - 1
    alone = [0, *(gathered or [0] * len(units)), 0]  # one more at both ends
    kept, forward = 0, 0
    for at, unit in enumerate(own, first + 1):
        forward = max(forward, kept + unit.forward_working_bytes + 2 * alone[at])
        kept = unit.output_bytes if recomputed or not training else kept + unit.saved_bytes.added(first)
    if not training:
        return StageWorkingMemory(forward_bytes=forward)
    if ends:
        forward = max(forward, kept + terms.loss_forward_working_bytes)
    loss_kept, loss_rise = (terms.loss_kept_bytes, terms.loss_backward_working_bytes) if ends else (0, 0)
    again = sum(unit.saved_bytes.added(first) for unit in own) if recomputed else 0
    rises = []
    for makes in (True, False):
        level, highest = (0, max(0, loss_rise + loss_kept - again)) if recomputed else (-loss_kept, loss_rise)
        waiting: dict[int, int] = {}
        for at in range(last, first - 1, -1):
            unit = units[at]
            before, whole, behind = alone[at : at + 3]
            highest = max(
                highest,
                level + unit.output_bytes + unit.backward_working_bytes + before + whole + behind,
                level + unit.output_bytes + 2 * whole + behind,
            )
            # A tied weight's gradient is held from its last use back to its first, where both are added.
            tied = [(earlier, part) for earlier, part in unit.parameter_bytes.shares if earlier >= first]
            for earlier, part in tied:
                waiting[earlier] = waiting.get(earlier, 0) + part
            share = held_share if whole else 1.0  # what is not gathered alone is whole to the end of the pass
            made = int(share * unit.parameter_bytes.total) if makes else sum(part for _, part in tied)
            level += made - unit.saved_bytes.added(first)
            level -= waiting.pop(at, 0)
        rises.append(highest)
    most = max(unit.output_bytes + max(0, unit.backward_working_bytes - unit.parameter_bytes.total) for unit in own)
    return StageWorkingMemory(
        forward_bytes=forward,
        first_backward_bytes=rises[0],
        later_backward_bytes=rises[1],
        input_backward_bytes=max(most, loss_rise),
        weight_backward_bytes=max(unit.parameter_bytes.total + unit.output_bytes for unit in own),
    )
