"""What recomputed units hold and repeat, on profiles whose amounts are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from made_profiles import unit
from stagewright.errors import UsageError
from stagewright.profiler.profile import Amount, AttentionProfile, Time
from stagewright.simulator.costs.expert_traffic import ExpertTraffic
from stagewright.simulator.costs.recomputation import (
    Treatments,
    UnitMemory,
    attention_memory,
    recompute_attention,
    recompute_units,
    treatments_of,
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


def again(*units: int) -> Treatments:
    return Treatments(recomputed=frozenset(units))


def test_kept_and_recomputed() -> None:
    assert unit_memory([UNIT] * 3, 0, 2, again(1)) == [KEPT, RECOMPUTED, KEPT]
    assert unit_memory([UNIT] * 3, 1, 2, again(1, 2)) == [RECOMPUTED, RECOMPUTED]


def test_an_input_that_the_unit_before_saves_counts_once() -> None:
    after = replace(UNIT, saved_bytes=Amount(total=10, shares=((0, 2),)))
    assert unit_memory([UNIT, after], 0, 1, again(1)) == [KEPT, UnitMemory(held_bytes=0, recomputed_bytes=8)]
    assert unit_memory([UNIT, after], 0, 1, again(0)) == [RECOMPUTED, KEPT], (
        "recomputed, the unit before has dropped it"
    )
    assert unit_memory([UNIT, after], 0, 1, again()) == [KEPT, UnitMemory(held_bytes=8)]


def test_a_mask_counts_once() -> None:
    masked = replace(UNIT, recompute_saved_bytes=2 + 4)
    found = unit_memory([UNIT, masked, masked], 0, 2, again(1, 2))
    assert [memory.held_bytes for memory in found] == [10, 2 + 4, 2]


def test_backward_rises_by_one_unit_at_a_time() -> None:
    """From the last unit: 8 recomputed; −10 for the unit, +3 for its gradients; +8 for the next one."""
    options = {"traffic": [TensorTraffic()] * 3, "experts": [ExpertTraffic()] * 3, "tensor_s": lambda _: 0.0}
    found = recompute_units([UNIT] * 3, 0, 2, again(1, 2), gradients=[3, 3, 3], loss_bytes=0, **options)
    assert (found.held_bytes, found.rise_bytes, found.first_rise_bytes) == (14, 8, 9)
    assert found.units == {1, 2}
    assert found.forward_share == 2 / 3
    found = recompute_units([UNIT] * 3, 0, 2, again(0), gradients=[0, 0, 0], loss_bytes=0, **options)
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
    assert treatments_of(plan, [UNIT, WITH_ATTENTION]) == Treatments(attention=frozenset({1}))
    assert treatments_of(replace(plan, training=False), [UNIT]) == Treatments()
    with pytest.raises(UsageError, match="the units of made have none"):
        treatments_of(plan, [UNIT, UNIT])


def test_offloaded_units_hold_nothing_and_come_back_ahead() -> None:
    """Of five units the first two are offloaded; their copies are freed before the fourth and the fifth unit."""
    options = {"traffic": [TensorTraffic()] * 5, "experts": [ExpertTraffic()] * 5, "tensor_s": lambda _: 0.0}
    offloaded = Treatments(offloaded=frozenset({0, 1}))
    memory = unit_memory([UNIT] * 5, 0, 4, offloaded)
    assert [one.held_bytes for one in memory] == [0, 0, 10, 10, 10]
    assert [one.in_flight_bytes for one in memory] == [0, 10, 20, 10, 0]
    assert [one.fetched_bytes for one in memory] == [10, 20, 20, 20, 10]
    found = recompute_units([UNIT] * 5, 0, 4, offloaded, gradients=[0] * 5, loss_bytes=0, **options)
    assert (found.held_bytes, found.offload_bytes, found.forward_share) == (30, 20, 0.0)
    assert found.rise_bytes == 10, "the room of the freed last unit is taken by the second fetch"
    found = recompute_units([UNIT] * 2, 0, 1, offloaded, gradients=[0] * 2, loss_bytes=0, **options)
    assert found.rise_bytes == 20, "no later unit frees them"


def test_mixed_treatments() -> None:
    options = {"traffic": [TensorTraffic()] * 3, "experts": [ExpertTraffic()] * 3, "tensor_s": lambda _: 0.0}
    mixed = Treatments(recomputed=frozenset({0}), attention=frozenset({1}), offloaded=frozenset({2}))
    units = [UNIT, WITH_ATTENTION, UNIT]
    found = recompute_units(units, 0, 2, mixed, gradients=[0] * 3, loss_bytes=0, **options)
    assert found.units == {0, 1, 2}
    assert (found.held_bytes, found.offload_bytes) == (2 + 5, 10)
    assert found.forward_share == pytest.approx((1.0 + 0.2) / 3)


def test_plans_with_offload() -> None:
    units = [replace(WITH_ATTENTION, name=name) for name in ("a", "b", "c")]
    plan = Plan(model=ModelSpec(name="made"), batch=8, recompute=("a", "b:attention"), offload="always")
    assert treatments_of(plan, units) == Treatments(
        recomputed=frozenset({0}), attention=frozenset({1}), offloaded=frozenset({2})
    )
    assert treatments_of(replace(plan, recompute="attention", offload=("a",)), units) == Treatments(
        attention=frozenset({1, 2}), offloaded=frozenset({0})
    )
