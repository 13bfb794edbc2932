"""Temporary memory of operators while a stage runs, as the allocator counts it.

    forward    of unit k    activations saved by earlier units + its own rise (outputs included)
    backward   of unit k    − activations saved by later units + their parameter gradients + gradient of its outputs
                              + its own rise
    … input gradients only  no activation is freed yet and no weight gradient exists
    FSDP       forward      + its parameters twice: the all-gather buffer and the individual tensors
               backward     + its parameters, the prefetched ones of the next unit, the gradients of the previous one

Units are profiled separately, each with its rise above the memory at its start; this module puts them in sequence. On a
CPU only tensors are counted: in inference the operators' results; in training the saved activations, which are counted
elsewhere, so that all values here are 0.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stagewright.profiler.profile import UnitProfile
from stagewright.simulator.costs.overheads import ModelOverheads
from stagewright.simulator.costs.recomputation import UnitMemory, resident_offload_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWorkingMemory:
    """Memory rise above a stage's start while it runs, for one micro-batch of the profiled size."""

    forward_bytes: int = 0
    first_backward_bytes: int = 0
    """The first backward of a step, which allocates the parameters' gradients."""
    later_backward_bytes: int = 0
    """Later backwards, which accumulate into them."""
    input_backward_bytes: int = 0
    """The input-gradient half of a split backward."""
    weight_backward_bytes: int = 0
    """The weight-gradient half when gradients exist already: one unit's new gradients before they are accumulated, and
    the tensors they are computed from."""


NO_WORKING_MEMORY = StageWorkingMemory()


def stage_working_memory(
    units: Sequence[UnitProfile],
    first: int,
    last: int,
    overheads: ModelOverheads,
    *,
    recomputed: bool,
    training: bool,
    whole_bytes: int = 0,
    held_share: float = 1.0,
    gathered: Sequence[int] = (),
    by_unit: Sequence[UnitMemory] | None = None,
    offloaded: Collection[int] = (),
) -> StageWorkingMemory:
    """Compute the working memory of the stage of units first … last.

    ``recomputed``: forward saves nothing inside the stage; backward starts when all of it is recomputed and the loss
    backward is done. ``held_share``: fraction of a unit's gradients that stays after FSDP reduce-scatters them; 0 if
    backward steps their parameters.
    ``gathered``: bytes of each unit that FSDP gathers separately, 0 for the others. ``whole_bytes``: logits of a
    divided vocabulary that are gathered after the last unit. ``by_unit``: activations of each unit of the stage, if
    some are recomputed one by one or offloaded; ``offloaded``: the latter.
    """
    stage_units = units[first : last + 1]
    if not any(unit.forward_working_bytes for unit in stage_units):
        return NO_WORKING_MEMORY
    gathered_bytes = gathered or [0] * len(units)
    is_last = last == len(units) - 1
    activations = by_unit or [UnitMemory(held_bytes=unit.saved_bytes.added(first)) for unit in stage_units]
    saved, forward = 0, 0
    for index, (unit, own) in enumerate(zip(stage_units, activations, strict=True), first):
        # What attention computes between its linear layers is freed before later layers save something.
        dropped = min(own.recomputed_bytes, own.later_bytes)
        working = unit.forward_working_bytes - dropped + 2 * gathered_bytes[index]
        forward = max(forward, saved + own.in_flight_bytes + working)
        saved = unit.output_bytes if recomputed or not training else saved + own.held_bytes
    if not training:
        # The parts that an all-gather receives, and the whole that is made of them.
        return StageWorkingMemory(forward_bytes=max(forward, saved + 2 * whole_bytes if whole_bytes else 0))
    if is_last:
        resident = resident_offload_bytes(units, first, last, offloaded)
        forward = max(forward, saved + resident + overheads.loss_forward_working_bytes)
    loss_saved, loss_rise = (overheads.loss_kept_bytes, overheads.loss_backward_working_bytes) if is_last else (0, 0)
    recomputed_bytes = sum(unit.saved_bytes.added(first) for unit in stage_units) if recomputed else 0
    start = (0, max(0, loss_rise + loss_saved - recomputed_bytes)) if recomputed else (-loss_saved, loss_rise)
    first_backward, later_backward = (
        _backward_peak(units, first, last, activations, start, gathered_bytes, held_share, allocates=allocates)
        for allocates in (True, False)
    )
    input_backward = max(
        unit.output_bytes + max(0, unit.backward_working_bytes - unit.parameter_bytes.total) for unit in stage_units
    )
    return StageWorkingMemory(
        forward_bytes=forward,
        first_backward_bytes=first_backward,
        later_backward_bytes=later_backward,
        input_backward_bytes=max(input_backward, loss_rise),
        weight_backward_bytes=max(unit.parameter_bytes.total + unit.output_bytes for unit in stage_units),
    )


def _backward_peak(
    units: Sequence[UnitProfile],
    first: int,
    last: int,
    activations: Sequence[UnitMemory],
    start: tuple[int, int],
    gathered: Sequence[int],
    held_share: float,
    *,
    allocates: bool,
) -> int:
    """Return the peak of a backward above its start; ``allocates``: whether it allocates the gradients.

    ``start``: the memory level after the loss backward, and the peak until then.
    """
    level, peak = start
    padded = [0, *gathered, 0]
    pending: dict[int, int] = {}
    for index in range(last, first - 1, -1):
        unit, memory = units[index], activations[index - first]
        before, own, behind = padded[index : index + 3]
        if memory.recomputed_bytes and not memory.later_bytes:
            peak = max(peak, level + unit.output_bytes + unit.forward_working_bytes + own)
        level += memory.added_bytes
        peak = max(
            peak,
            level + unit.output_bytes + unit.backward_working_bytes + before + own + behind,
            level + unit.output_bytes + 2 * own + behind,
        )
        # A tied weight's gradient is held from its last use back to its first, where both are added.
        tied = [(earlier, size) for earlier, size in unit.parameter_bytes.shares if earlier >= first]
        for earlier, size in tied:
            pending[earlier] = pending.get(earlier, 0) + size
        # Parameters that are not gathered separately stay whole until the end of the pass.
        share = held_share if own or not held_share else 1.0
        allocated = int(share * unit.parameter_bytes.total) if allocates else sum(size for _, size in tied)
        level += allocated - memory.held_bytes - memory.added_bytes - pending.pop(index, 0)
    return peak
