"""What activation checkpointing of a stage repeats and holds: of the whole stage, of units, or of attention in units.

    between forward and backward     whole stage        its inputs
                                     by unit            everything of kept units + the inputs of recomputed ones
                                     attention          everything but what attention computes between linear layers
    in backward                      whole stage        + all activations at once
                                     by unit            + those of one recomputed unit at a time, after the
                                                          activations of later units are freed
                                     attention          + those of one attention at a time, after the activations of
                                                          later units and of later layers of its unit are freed

Units are profiled with the bytes they save and those of their inputs. Which of these are the same tensor follows from
shapes and shares: the main input of a unit is the output of the unit before, which that unit may save too; other
inputs (masks, position embeddings) are the same for all units of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from stagewright.profiler.profile import UnitProfile
from stagewright.simulator.costs.expert_traffic import ExpertTraffic
from stagewright.simulator.costs.tensor_traffic import StageSequenceTraffic, TensorTraffic
from stagewright.spec.activation_checkpointing import check_recomputed_units, no_attention
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

    @property
    def added_bytes(self) -> int:
        """What recomputation adds to the memory at the start of the unit's backward."""
        return max(0, self.recomputed_bytes - self.later_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecomputation:
    """The recomputation of one stage, for one micro-batch of the profiled size."""

    units: frozenset[int] = frozenset()
    """The units that are recomputed, or whose attention is; empty if the whole stage is recomputed, or nothing."""
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
    chosen: Collection[int],
    traffic: Sequence[TensorTraffic],
    experts: Sequence[ExpertTraffic],
    tensor_s: Callable[[Sequence[TensorTraffic]], float],
    gradients: Sequence[int],
    loss_bytes: int,
) -> StageRecomputation:
    """Return the recomputation of the units ``chosen`` in the stage first … last.

    ``tensor_s``: time of the collectives of some units. ``gradients``: bytes of gradients that the first backward of
    each unit of the stage allocates.
    """
    inside = sorted(index for index in chosen if first <= index <= last)
    stage, own = range(first, last + 1), [traffic[index] for index in inside]
    memory = unit_memory(units, first, last, inside)
    whole_s = sum(units[index].forward.median_s for index in stage)
    whole_tensor_s = tensor_s([traffic[index] for index in stage])
    whole_rows = sum(sum(experts[index].row_bytes) for index in stage)
    return StageRecomputation(
        units=frozenset(inside),
        forward_share=sum(units[index].forward.median_s for index in inside) / whole_s if whole_s else 0.0,
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
                    *(() if unit.sequence.continues else unit.sequence.joined_bytes),
                )
            ),
            forward_scattered_bytes=tuple(size for unit in own for size in unit.sequence.scattered_bytes),
        ),
        held_bytes=sum(unit.held_bytes for unit in memory),
        rise_bytes=_rise(memory, [0] * len(memory), loss_bytes),
        first_rise_bytes=_rise(memory, gradients, loss_bytes),
    )


def recompute_attention(
    units: Sequence[UnitProfile], first: int, last: int, gradients: Sequence[int], loss_bytes: int
) -> StageRecomputation:
    """Return the recomputation of the attention inside the units of the stage first … last; see ``recompute_units``."""
    memory = attention_memory(units, first, last)
    attentions = {index: unit.attention for index, unit in enumerate(units[first : last + 1], first) if unit.attention}
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


def recomputed_indices(plan: Plan, units: Sequence[UnitProfile]) -> frozenset[int]:
    """Return the units that a plan recomputes one by one, or whose attention it recomputes."""
    names = [unit.name for unit in units]
    check_recomputed_units(plan, names)
    if not plan.training:
        return frozenset()
    if plan.recompute != "attention":
        return frozenset(names.index(name) for name in plan.recomputed_units)
    found = frozenset(index for index, unit in enumerate(units) if unit.attention is not None)
    if not found:
        raise no_attention(plan.model.name)
    return found


def attention_memory(units: Sequence[UnitProfile], first: int, last: int) -> list[UnitMemory]:
    """Return the activations of each unit of the stage first … last, whose attention is recomputed."""
    memory = []
    for unit in units[first : last + 1]:
        attention = unit.attention
        if attention is None:
            memory.append(UnitMemory(held_bytes=unit.saved_bytes.added(first)))
            continue
        earlier_share = attention.earlier_parameter_bytes / max(1, unit.parameter_bytes.total)
        memory.append(
            UnitMemory(
                held_bytes=attention.saved_bytes.added(first),
                recomputed_bytes=attention.recomputed_bytes,
                later_bytes=attention.later_bytes,
                later_gradient_share=max(0.0, 1 - earlier_share),
            )
        )
    return memory


def unit_memory(units: Sequence[UnitProfile], first: int, last: int, chosen: Collection[int]) -> list[UnitMemory]:
    """Return the activations of each unit of the stage first … last, of which ``chosen`` are recomputed."""
    memory: list[UnitMemory] = []
    has_side_inputs = False  # whether an earlier unit of the stage holds masks and the like
    for index in range(first, last + 1):
        unit = units[index]
        main, side = _inputs(units, index)
        shared = sum(size for earlier, size in unit.saved_bytes.shares if earlier >= first)
        is_main_shared = index > first and _is_main_shared(units, index)
        is_main_held = is_main_shared and index - 1 not in chosen
        shared_sides = shared - (main if is_main_shared else 0)
        if index in chosen:
            held = (0 if is_main_held else main) + (0 if has_side_inputs else side)
            inputs = main + side if saves_inputs(unit, main + side) else 0
            memory.append(UnitMemory(held_bytes=held, recomputed_bytes=max(0, unit.saved_bytes.total - inputs)))
            has_side_inputs = has_side_inputs or side > 0
        else:
            held = unit.saved_bytes.total - shared_sides - (main if is_main_held else 0)
            memory.append(UnitMemory(held_bytes=max(0, held)))
            has_side_inputs = has_side_inputs or (side > 0 and saves_inputs(unit, main + side))
    return memory


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
        peak = max(peak, level, level + unit.recomputed_bytes)
        level += gradient - later - (unit.held_bytes - unit.later_bytes)
        peak = max(peak, level)
    return peak
