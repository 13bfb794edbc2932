"""What activation checkpointing and offload of a stage repeat and hold: of the whole stage, or by unit.

    between forward and backward     whole stage        its inputs
                                     by unit            everything of kept units + the inputs of recomputed ones
                                     attention          everything but what attention computes between linear layers
                                     offload            nothing, or everything where no later unit frees it
    in backward                      whole stage        + all activations at once
                                     by unit            + those of one recomputed unit at a time, after the
                                                          activations of later units are freed
                                     attention          + those of one attention at a time, after the activations of
                                                          later units and of later layers of its unit are freed
                                     offload            + those of units that are fetched, until their backward

Units are profiled with the bytes they save and those of their inputs. Which of these are the same tensor follows from
shapes and shares: the main input of a unit is the output of the unit before, which that unit may save too; other
inputs (masks, position embeddings) are the same for all units of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from stagewright.profiler.profile import UnitProfile
from stagewright.simulator.costs.expert_traffic import ExpertTraffic
from stagewright.simulator.costs.tensor_traffic import StageSequenceTraffic, TensorTraffic
from stagewright.spec.activation_checkpointing import (
    check_recomputed_units,
    no_attention,
    offload_windows,
    offloaded_units,
)
from stagewright.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitMemory:
    """Activations of one unit in a stage."""

    held_bytes: int
    """Held between forward and backward, without what other units of the stage hold."""
    recomputed_bytes: int = 0
    """Added in backward by recomputation."""
    later_bytes: int = 0
    """Part of `held_bytes` that backward frees before it recomputes."""
    later_gradient_share: float = 0.0
    """Share of the unit's gradients that backward makes before it recomputes."""
    in_flight_bytes: int = 0
    """Activations of earlier offloaded units that are still on the device when the unit's forward begins."""
    fetched_bytes: int = 0
    """Activations of offloaded units, itself included, that are back on the device in the unit's backward."""

    @property
    def added_bytes(self) -> int:
        """What recomputation and fetches add to the memory at the start of the unit's backward."""
        return max(0, self.recomputed_bytes - self.later_bytes) + self.fetched_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatments:
    """The units of a plan whose activations are not kept; each is in one set at most."""

    recomputed: frozenset[int] = frozenset()
    attention: frozenset[int] = frozenset()
    """Units of which attention alone is recomputed."""
    offloaded: frozenset[int] = frozenset()

    @property
    def units(self) -> frozenset[int]:
        """All of them."""
        return self.recomputed | self.attention | self.offloaded

    def within(self, first: int, last: int) -> Treatments:
        """Return those of the units first … last."""
        sets = (self.recomputed, self.attention, self.offloaded)
        inside = [frozenset(index for index in units if first <= index <= last) for units in sets]
        return Treatments(recomputed=inside[0], attention=inside[1], offloaded=inside[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecomputation:
    """The recomputation and offload of one stage, for one micro-batch of the profiled size."""

    units: frozenset[int] = frozenset()
    """The units that are offloaded, recomputed, or whose attention is; empty if the whole stage is recomputed, or
    nothing."""
    forward_share: float = 1.0
    """Share of the stage's forward compute that is repeated."""
    tensor_share: float = 1.0
    """Share of the time of the tensor axis's collectives in forward."""
    expert_share: float = 1.0
    """Share of the time, and bytes, of the expert axis's collectives in forward."""
    forward_bytes: tuple[int, ...] = ()
    """Bytes of each repeated all-reduce of the tensor axis."""
    gathered_bytes: tuple[int, ...] = ()
    """Bytes of each repeated all-gather of the tensor axis."""
    sequence: StageSequenceTraffic = field(default_factory=StageSequenceTraffic)
    """Repeated collectives of divided sequences."""
    held_bytes: int
    """Activations held between forward and backward."""
    rise_bytes: int = 0
    """By unit or attention: peak of the activations of a backward above its start."""
    first_rise_bytes: int = 0
    """By unit or attention: the same for the first backward, with gradients that appear."""
    offload_bytes: int = 0
    """Activations copied to the host in forward, and back in backward."""


def recompute_whole(
    held_bytes: int, forward_bytes: tuple[int, ...], gathered_bytes: tuple[int, ...], sequence: StageSequenceTraffic
) -> StageRecomputation:
    """Return the recomputation of a whole stage."""
    return StageRecomputation(
        forward_bytes=forward_bytes, gathered_bytes=gathered_bytes, sequence=sequence, held_bytes=held_bytes
    )


def recompute_units(
    units: Sequence[UnitProfile],
    first: int,
    last: int,
    treatments: Treatments,
    traffic: Sequence[TensorTraffic],
    experts: Sequence[ExpertTraffic],
    tensor_s: Callable[[Sequence[TensorTraffic]], float],
    gradients: Sequence[int],
    loss_bytes: int,
) -> StageRecomputation:
    """Return the recomputation and offload of units in the stage first … last.

    ``tensor_s``: time of the collectives of some units. ``gradients``: bytes of gradients that the first backward of
    each unit of the stage allocates.
    """
    chosen = treatments.within(first, last)
    inside = sorted(chosen.recomputed)
    stage, own = range(first, last + 1), [traffic[index] for index in inside]
    memory = unit_memory(units, first, last, chosen)
    recompute_s = sum(units[index].forward.median_s for index in inside)
    recompute_s += sum(
        attention.recompute.median_s for index in chosen.attention if (attention := units[index].attention)
    )
    resident_bytes = resident_offload_bytes(units, first, last, chosen.offloaded)
    whole_s = sum(units[index].forward.median_s for index in stage)
    whole_tensor_s = tensor_s([traffic[index] for index in stage])
    whole_rows = sum(sum(experts[index].row_bytes) for index in stage)
    return StageRecomputation(
        units=chosen.units,
        forward_share=recompute_s / whole_s if whole_s else 0.0,
        tensor_share=tensor_s(own) / whole_tensor_s if whole_tensor_s else 0.0,
        expert_share=sum(sum(experts[index].row_bytes) for index in inside) / whole_rows if whole_rows else 0.0,
        forward_bytes=tuple(size for unit in own for size in unit.forward_bytes),
        gathered_bytes=tuple(size for unit in own for size in unit.gathered_bytes),
        sequence=StageSequenceTraffic(
            forward_gathered_bytes=tuple(
                size
                for unit in own
                for size in (
                    *unit.sequence.gathered_bytes,
                    *unit.sequence.replicated_bytes,
                    *(() if unit.sequence.continues else unit.sequence.joined_bytes),
                )
            ),
            forward_scattered_bytes=tuple(size for unit in own for size in unit.sequence.scattered_bytes),
        ),
        held_bytes=sum(unit.held_bytes for unit in memory),
        rise_bytes=max(resident_bytes, _rise(memory, [0] * len(memory), loss_bytes)),
        first_rise_bytes=max(resident_bytes, _rise(memory, gradients, loss_bytes)),
        offload_bytes=sum(units[index].saved_bytes.added(first) for index in chosen.offloaded),
    )


def recompute_attention(
    units: Sequence[UnitProfile],
    first: int,
    last: int,
    gradients: Sequence[int],
    loss_bytes: int,
    chosen: Collection[int] | None = None,
) -> StageRecomputation:
    """Return the recomputation of attention in the stage first … last, in ``chosen`` units or all with attention.

    The other arguments are those of ``recompute_units``.
    """
    memory = attention_memory(units, first, last, chosen)
    attentions = {
        index: unit.attention
        for index, unit in enumerate(units[first : last + 1], first)
        if unit.attention and (chosen is None or index in chosen)
    }
    whole_s = sum(unit.forward.median_s for unit in units[first : last + 1])
    recompute_s = sum(attention.recompute.median_s for attention in attentions.values())
    return StageRecomputation(
        units=frozenset(attentions),
        forward_share=recompute_s / whole_s if whole_s else 0.0,
        tensor_share=0.0,
        expert_share=0.0,
        held_bytes=sum(unit.held_bytes for unit in memory),
        rise_bytes=_rise(memory, [0] * len(memory), loss_bytes),
        first_rise_bytes=_rise(memory, gradients, loss_bytes),
    )


def treatments_of(plan: Plan, units: Sequence[UnitProfile]) -> Treatments:
    """Return the units that a plan recomputes, wholly or their attention, and those that it offloads."""
    names = [unit.name for unit in units]
    check_recomputed_units(plan, names)
    if not plan.training:
        return Treatments()
    offloaded = frozenset(names.index(name) for name in offloaded_units(plan, units))
    attention = frozenset(names.index(name) for name in plan.attention_units)
    found = frozenset(index for index, unit in enumerate(units) if unit.attention is not None)
    if (plan.recompute == "attention" and not found) or attention - found:
        raise no_attention(plan.model.name)
    return Treatments(
        recomputed=frozenset(names.index(name) for name in plan.recomputed_units),
        attention=(found if plan.recompute == "attention" else attention) - offloaded,
        offloaded=offloaded,
    )


def attention_memory(
    units: Sequence[UnitProfile], first: int, last: int, chosen: Collection[int] | None = None
) -> list[UnitMemory]:
    """Return the activations of each unit of the stage first … last; attention of ``chosen`` units is recomputed."""
    return [
        UnitMemory(held_bytes=units[index].saved_bytes.added(first))
        if units[index].attention is None or (chosen is not None and index not in chosen)
        else _with_attention(units[index], first)
        for index in range(first, last + 1)
    ]


def _with_attention(unit: UnitProfile, first: int) -> UnitMemory:
    """Return the activations of a unit whose attention is recomputed, in a stage that begins with ``first``."""
    attention = unit.attention
    assert attention is not None
    earlier_share = attention.earlier_parameter_bytes / max(1, unit.parameter_bytes.total)
    return UnitMemory(
        held_bytes=attention.saved_bytes.added(first),
        recomputed_bytes=attention.recomputed_bytes,
        later_bytes=attention.later_bytes,
        later_gradient_share=max(0.0, 1 - earlier_share),
    )


def unit_memory(units: Sequence[UnitProfile], first: int, last: int, treatments: Treatments) -> list[UnitMemory]:
    """Return the activations of each unit of the stage first … last."""
    memory: list[UnitMemory] = []
    dropped = treatments.recomputed | treatments.offloaded
    has_side_inputs = False  # whether an earlier unit of the stage holds masks and the like
    for index in range(first, last + 1):
        unit = units[index]
        main, side = _inputs(units, index)
        shared = sum(size for earlier, size in unit.saved_bytes.shares if earlier >= first)
        is_main_shared = index > first and _is_main_shared(units, index)
        is_main_held = is_main_shared and index - 1 not in dropped
        shared_sides = shared - (main if is_main_shared else 0)
        if index in treatments.offloaded:
            memory.append(UnitMemory(held_bytes=0))
        elif index in treatments.recomputed:
            held = (0 if is_main_held else main) + (0 if has_side_inputs else side)
            inputs = main + side if saves_inputs(unit, main + side) else 0
            memory.append(UnitMemory(held_bytes=held, recomputed_bytes=max(0, unit.saved_bytes.total - inputs)))
            has_side_inputs = has_side_inputs or side > 0
        elif index in treatments.attention:
            memory.append(_with_attention(unit, first))
        else:
            held = unit.saved_bytes.total - shared_sides - (main if is_main_held else 0)
            memory.append(UnitMemory(held_bytes=max(0, held)))
            has_side_inputs = has_side_inputs or (side > 0 and saves_inputs(unit, main + side))
    offloaded = sorted(treatments.within(first, last).offloaded)
    windows = offload_windows([index - first for index in offloaded], last + 1 - first)
    for index, (freed, fetched) in zip(offloaded, windows, strict=True):
        size, start = units[index].saved_bytes.total, index - first
        for position, own in enumerate(memory):
            memory[position] = replace(
                own,
                in_flight_bytes=own.in_flight_bytes + (size if start < position < freed else 0),
                fetched_bytes=own.fetched_bytes + (size if start <= position <= fetched else 0),
            )
    return memory


def resident_offload_bytes(units: Sequence[UnitProfile], first: int, last: int, offloaded: Collection[int]) -> int:
    """Return the activations of offloaded units of the stage first … last that no later unit frees."""
    inside = sorted(index for index in offloaded if first <= index <= last)
    windows = offload_windows([index - first for index in inside], last + 1 - first)
    pairs = zip(inside, windows, strict=True)
    return sum(units[index].saved_bytes.total for index, (freed, _) in pairs if freed > last - first)


def saves_inputs(unit: UnitProfile, input_bytes: int) -> bool:
    """Whether a unit's saved activations include its inputs, as with most layers."""
    return unit.saved_bytes.total >= input_bytes


def _inputs(units: Sequence[UnitProfile], index: int) -> tuple[int, int]:
    """Return the bytes of a unit's main input, the output of the unit before, and of its other inputs."""
    inputs = units[index].recompute_saved_bytes
    main = min(inputs, units[index - 1].output_bytes) if index else inputs
    return main, inputs - main


def _is_main_shared(units: Sequence[UnitProfile], index: int) -> bool:
    """Whether the unit before saves its output, and this unit its main input."""
    main, _ = _inputs(units, index)
    return 0 < main <= dict(units[index].saved_bytes.shares).get(index - 1, 0)


def _rise(memory: Sequence[UnitMemory], gradients: Sequence[int], loss_bytes: int) -> int:
    """Return the peak of a backward above its start, as activations are recomputed and freed and gradients appear."""
    peak, level = 0, -loss_bytes
    for unit, gradient in zip(reversed(memory), reversed(gradients), strict=True):
        later = int(gradient * unit.later_gradient_share)
        level += later - unit.later_bytes
        peak = max(peak, level, level + unit.recomputed_bytes + unit.fetched_bytes)
        level += gradient - later - (unit.held_bytes - unit.later_bytes)
        peak = max(peak, level)
    return peak
