"""What recomputed units hold and repeat, on profiles whose amounts are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from made_profiles import unit
from stagewright.errors import UsageError
from stagewright.profiler.profile import Amount, AttentionProfile, Time
from stagewright.simulator.costs.expert_traffic import ExpertTraffic
from stagewright.simulator.costs.recomputation import (
    UnitMemory,
    attention_memory,
    recompute_attention,
    recompute_units,
    recomputed_indices,
    unit_memory,
)
from stagewright.simulator.costs.tensor_traffic import TensorTraffic
from stagewright.spec.plan import Mesh, ModelSpec, Plan

# Each unit saves 10 bytes, of which 2 are its input.
UNIT = unit(
    "unit",
    1.0,
    (1.0, 1.0),
    saved_bytes=Amount(total=10),
    recompute_saved_bytes=2,
    output_bytes=2,
    parameter_bytes=Amount(total=3),
)
KEPT, RECOMPUTED = UnitMemory(held_bytes=10), UnitMemory(held_bytes=2, recomputed_bytes=8)


def test_kept_and_recomputed() -> None:
    assert unit_memory([UNIT] * 3, 0, 2, {1}) == [KEPT, RECOMPUTED, KEPT]
    assert unit_memory([UNIT] * 3, 1, 2, {1, 2}) == [RECOMPUTED, RECOMPUTED]


def test_an_input_that_the_unit_before_saves_counts_once() -> None:
    after = replace(UNIT, saved_bytes=Amount(total=10, shares=((0, 2),)))
    assert unit_memory([UNIT, after], 0, 1, {1}) == [KEPT, UnitMemory(held_bytes=0, recomputed_bytes=8)]
    assert unit_memory([UNIT, after], 0, 1, {0}) == [RECOMPUTED, KEPT], "recomputed, the unit before has dropped it"
    assert unit_memory([UNIT, after], 0, 1, ()) == [KEPT, UnitMemory(held_bytes=8)]


def test_a_mask_counts_once() -> None:
    masked = replace(UNIT, recompute_saved_bytes=2 + 4)
    found = unit_memory([UNIT, masked, masked], 0, 2, {1, 2})
    assert [memory.held_bytes for memory in found] == [10, 2 + 4, 2]


def test_backward_rises_by_one_unit_at_a_time() -> None:
    """From the last unit: 8 recomputed; −10 for the unit, +3 for its gradients; +8 for the next one."""
    options = {"traffic": [TensorTraffic()] * 3, "experts": [ExpertTraffic()] * 3, "tensor_s": lambda _: 0.0}
    found = recompute_units([UNIT] * 3, 0, 2, {1, 2}, gradients=[3, 3, 3], loss_bytes=0, **options)
    assert (found.held_bytes, found.rise_bytes, found.first_rise_bytes) == (14, 8, 9)
    assert found.units == {1, 2}
    assert found.forward_share == 2 / 3
    found = recompute_units([UNIT] * 3, 0, 2, {0}, gradients=[0, 0, 0], loss_bytes=0, **options)
    assert (found.held_bytes, found.rise_bytes) == (22, 0), "by then, more has been freed"


# Of the 10 bytes, attention saves 6 between its linear layers; with 1 more for what is kept instead, 5 are held.
# Of these, 2 are saved after attention.
WITH_ATTENTION = replace(
    UNIT,
    attention=AttentionProfile(
        saved_bytes=Amount(total=5),
        recomputed_bytes=6,
        later_bytes=2,
        earlier_parameter_bytes=1,
        recompute=Time(median_s=0.2, spread_s=0.0),
    ),
)


def test_attention_alone() -> None:
    """In backward, the layers after attention free 2 and make gradients of 2 before attention adds 6."""
    units = [UNIT, WITH_ATTENTION, WITH_ATTENTION]
    kept, *others = attention_memory(units, 0, 2)
    assert kept == KEPT
    assert others[0] == UnitMemory(held_bytes=5, recomputed_bytes=6, later_bytes=2, later_gradient_share=1 - 1 / 3)
    found = recompute_attention(units, 0, 2, gradients=[3, 3, 3], loss_bytes=0)
    assert found.units == {1, 2}
    assert found.held_bytes == 20
    assert found.forward_share == pytest.approx(0.4 / 3)
    assert (found.tensor_share, found.forward_bytes) == (0.0, ()), "no collective is repeated"
    assert found.rise_bytes == -2 + 6
    assert found.first_rise_bytes == 2 - 2 + 6


def test_plans_with_attention() -> None:
    plan = Plan(model=ModelSpec(name="made"), mesh=Mesh(), batch=8, recompute="attention")
    assert recomputed_indices(plan, [UNIT, WITH_ATTENTION]) == {1}
    assert recomputed_indices(replace(plan, training=False), [UNIT]) == frozenset()
    with pytest.raises(UsageError, match="the units of made have none"):
        recomputed_indices(plan, [UNIT, UNIT])
