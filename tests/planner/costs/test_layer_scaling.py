"""A model with more layers than were measured has what one with so many layers really has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.planner.conftest import equal_amounts

from made_profiles import equal_units, profile_of, unit
from stagewright.errors import UsageError
from stagewright.graph import capture
from stagewright.planner.costs.layer_scaling import with_num_layers
from stagewright.planner.costs.measure import ModelCosts
from stagewright.profiler.measure import profile
from stagewright.profiler.profile import Amount, Profile, UnitProfile, amount_of
from stagewright.simulator.costs.overheads import ModelOverheads
from stagewright.simulator.costs.tensor_traffic import SequenceTraffic, TensorTraffic


def gpt(num_layers: int) -> ModelCosts:
    """A tiny GPT-2 as it is measured here: embedding and head tied, each block a unit."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16, n_layer=num_layers, n_head=2, vocab_size=40, n_positions=8, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    ids = {"input_ids": torch.arange(16).view(2, 8)}
    found = profile(capture(model, (), ids), (), ids, name="gpt", repeats=1, cache=False)
    return ModelCosts(profile=found, overheads=ModelOverheads())


@pytest.fixture(scope="module")
def measured() -> dict[int, ModelCosts]:
    return {count: gpt(count) for count in (3, 5)}


@pytest.mark.parametrize(("few", "many"), [(3, 5), (5, 3), (3, 3)])
def test_equals_the_model_that_is_as_long(few: int, many: int, measured: dict[int, ModelCosts]) -> None:
    made, real = with_num_layers(measured[few], many).profile, measured[many].profile
    assert [one.name for one in made.units] == [one.name for one in real.units]
    assert equal_amounts(made.units) == equal_amounts(real.units)
    assert made.parameters == real.parameters
    assert made.saved_bytes == real.saved_bytes
    assert made.whole_macs == real.whole_macs
    last = len(made.units) - 1
    for first in range(last):
        for name in ("parameter_bytes", "saved_bytes"):
            amounts = [[getattr(one, name) for one in each.units] for each in (made, real)]
            assert amount_of(amounts[0], first, last) == amount_of(amounts[1], first, last)


def test_sums() -> None:
    units = blocks_between(3)
    made = with_num_layers(ModelCosts(profile=profile_of(units), overheads=ModelOverheads()), 10).profile
    assert len(made.units) == 12
    assert len({one.name for one in made.units}) == 12
    assert len({one.block for one in made.units}) == 11, "no two blocks are one"
    assert made.whole_forward.median_s == pytest.approx(10 * 2 + 1 + 3)
    assert made.whole_backward.median_s == pytest.approx(sum(one.backward_s for one in made.units))
    assert [one.name for one in made.units if one.block is None] == ["stem", "head"]


def blocks_between(count: int, **sizes: Any) -> list[UnitProfile]:
    middle = [replace(unit(f"b{at}", 2.0, (2.0, 2.0), **sizes), block=f"b{at}") for at in range(count)]
    return [unit("stem", 1.0, (1.0, 1.0)), *middle, unit("head", 3.0, (3.0, 3.0))]


def test_what_is_shared_moves_along() -> None:
    """Each block saves what the one before returned, the head shares its weight with the stem and a tensor with the
    last block."""
    units = blocks_between(4)
    for at in (2, 3, 4):
        units[at] = replace(units[at], saved_bytes=Amount(total=1000, shares=((at - 1, 100),)))
    units[5] = replace(
        units[5],
        parameter_bytes=Amount(total=100, shares=((0, 100),)),
        saved_bytes=Amount(total=1000, shares=((4, 50),)),
    )
    made = with_num_layers(ModelCosts(profile=profile_of(units), overheads=ModelOverheads()), 8).profile.units
    assert made[9].parameter_bytes == Amount(total=100, shares=((0, 100),))
    assert made[9].saved_bytes == Amount(total=1000, shares=((8, 50),))
    assert [one.saved_bytes.shares for one in made[2:9]] == [((at - 1, 100),) for at in range(2, 9)]
    assert made[1].saved_bytes.shares == (), "the first block shares nothing with the stem, and none is before it"


def test_without_a_stem() -> None:
    units = [replace(one, block=one.name) for one in equal_units(4).units]
    shared = [
        units[0],
        *(replace(one, saved_bytes=Amount(total=1000, shares=((at, 100),))) for at, one in enumerate(units[1:])),
    ]
    made: Profile = with_num_layers(ModelCosts(profile=profile_of(shared), overheads=ModelOverheads()), 6).profile
    assert made.saved_bytes == 6 * 1000 - 5 * 100


def test_traffic_grows_too() -> None:
    once = TensorTraffic(forward_bytes=(10,), backward_bytes=(10,))
    traffic = (TensorTraffic(), *[once] * 4, TensorTraffic())
    measured = ModelCosts(
        profile=profile_of(blocks_between(4)), overheads=ModelOverheads(), tensor=traffic, num_tensor=2
    )
    found = with_num_layers(measured, 6)
    assert found.tensor == (TensorTraffic(), *[once] * 6, TensorTraffic())
    assert found.num_tensor == 2


def test_all_blocks_but_the_last_pass_shards_on() -> None:
    once = TensorTraffic(sequence=SequenceTraffic(joined_bytes=(10,), continues=True))
    last = TensorTraffic(sequence=SequenceTraffic(joined_bytes=(10,)))
    traffic = (TensorTraffic(), *[once] * 3, last, TensorTraffic())
    measured = ModelCosts(
        profile=profile_of(blocks_between(4)), overheads=ModelOverheads(), tensor=traffic, num_tensor=2
    )
    assert with_num_layers(measured, 6).tensor == (TensorTraffic(), *[once] * 5, last, TensorTraffic())


def test_refused() -> None:
    with pytest.raises(UsageError, match="no contiguous blocks"):
        with_num_layers(ModelCosts(profile=equal_units(3), overheads=ModelOverheads()), 4)
    parted = [replace(one, block="b" if at != 1 else None) for at, one in enumerate(equal_units(3).units)]
    with pytest.raises(UsageError, match="no contiguous blocks"):
        with_num_layers(ModelCosts(profile=profile_of(parted), overheads=ModelOverheads()), 4)
    halves = [replace(one, block=f"b{at // 2}") for at, one in enumerate(equal_units(4).units)]
    with pytest.raises(UsageError, match="several units per block"):
        with_num_layers(ModelCosts(profile=profile_of(halves), overheads=ModelOverheads()), 4)
