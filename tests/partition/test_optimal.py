from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from stagewright.errors import SplitError
from stagewright.partition import Conditions, Split, assess, split
from stagewright.profiler.profile import Amount, Profile

MakeProfile = Callable[..., Profile]


def _every_split(profile: Profile, num_stages: int, conditions: Conditions) -> list[Split]:
    choices = itertools.combinations(range(len(profile.units) - 1), num_stages - 1)
    return [assess(profile, "brute", cuts, conditions) for cuts in choices]


def _rank(split: Split) -> tuple[float, ...]:
    latency_s = sum(stage.time_s for stage in split.stages)
    squares = sum(stage.busy_s**2 for stage in split.stages)
    return (split.bottleneck_s, latency_s, split.sends_bytes, squares)


@st.composite
def _amounts(draw: st.DrawFn, num_units: int) -> list[Amount]:
    """Every unit holds some of up to four items; an item that an earlier unit holds too is a share."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=4, max_size=4))
    amounts: list[Amount] = []
    holder: dict[int, int] = {}
    for index in range(num_units):
        held = draw(st.sets(st.integers(0, 3)))
        common: dict[int, int] = {}
        for item in held & holder.keys():
            common[holder[item]] = common.get(holder[item], 0) + sizes[item]
        holder.update(dict.fromkeys(held, index))
        unshared = draw(st.integers(0, 5))
        amounts.append(Amount(total=unshared + sum(sizes[item] for item in held), shares=tuple(sorted(common.items()))))
    return amounts


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_optimal_equals_brute_force(make_profile: MakeProfile, data: st.DataObject) -> None:
    num_units = data.draw(st.integers(1, 7), label="units")
    num_stages = data.draw(st.integers(1, min(num_units, 4)), label="stages")

    def column(low: int, high: int) -> list[int]:
        return data.draw(st.lists(st.integers(low, high), min_size=num_units, max_size=num_units))

    training = data.draw(st.booleans(), label="training")
    profile = make_profile(
        column(0, 9),
        backward=column(0, 9) if training else None,
        parameters=data.draw(_amounts(num_units)),
        crossing=column(0, 16),
        saved=data.draw(_amounts(num_units)),
        inputs=column(0, 5),
        buffers=column(0, 5),
    )
    per_stage = {"min_size": num_stages, "max_size": num_stages}
    limits = st.integers(20, 600)
    conditions = Conditions(
        num_microbatches=data.draw(st.sampled_from([None, 1, 2, 3, 8, 1000]), label="micro-batches"),
        speeds=data.draw(st.none() | st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), **per_stage), label="speeds"),
        bandwidth_bytes_per_s=data.draw(st.sampled_from([None, 0.5, 4.0, 16.0]), label="bandwidth"),
        latency_s=data.draw(st.sampled_from([0.0, 0.5]), label="latency"),
        overlap_links=data.draw(st.booleans(), label="overlap"),
        recompute=data.draw(st.booleans(), label="recompute"),
        memory_limit_bytes=data.draw(st.none() | limits | st.lists(limits, **per_stage), label="limit"),
    )
    splits = _every_split(profile, num_stages, conditions)
    fitting = [candidate for candidate in splits if candidate.fits]
    if not fitting:
        least = min(
            max(device.memory_bytes - (device.memory_limit_bytes or 0) for device in candidate.devices)
            for candidate in splits
        )
        with pytest.raises(SplitError, match=f"{least} bytes more than its limit"):
            split(profile, num_stages, "optimal", conditions)
        return
    best = split(profile, num_stages, "optimal", conditions)
    assert best.fits
    assert _rank(best) == pytest.approx(min(map(_rank, fitting)), rel=1e-12)


def test_the_bottleneck_decides_then_the_latency(make_profile: MakeProfile) -> None:
    # Cut after unit 0: stages 3 | 5 and 4 s of link; after unit 1: stages 6 | 2 and a free link.
    profile = make_profile([3, 3, 2], crossing=[4, 0, 0])
    assert split(profile, 2, "optimal", Conditions(bandwidth_bytes_per_s=1.0)).cuts == (1,)
    # With overlapped links the bottleneck is 5 against 6 s, for any number of micro-batches.
    for num_microbatches, step_s in ((1, 12.0), (4, 27.0), (None, None)):
        conditions = Conditions(bandwidth_bytes_per_s=1.0, overlap_links=True, num_microbatches=num_microbatches)
        best = split(profile, 2, "optimal", conditions)
        assert (best.cuts, best.step_s) == ((0,), step_s)
    # The last unit is the bottleneck: the tie goes to the smaller latency.
    even = make_profile([1, 1, 1, 9], crossing=[3, 3, 2, 0])
    assert split(even, 3, "optimal", Conditions(bandwidth_bytes_per_s=1.0, overlap_links=True)).cuts == (0, 2)


def test_ties_go_to_fewer_bytes_then_to_better_balance(make_profile: MakeProfile) -> None:
    # One unit of 8 s is the bottleneck; the other four fit in the two stages before it in any way.
    times = [2, 2, 2, 2, 8]
    assert split(make_profile(times, crossing=[9, 9, 9, 9, 0]), 3).cuts == (1, 3)
    assert split(make_profile(times, crossing=[9, 9, 1, 9, 0]), 3).cuts == (2, 3)


def test_speeds_are_in_stage_order(make_profile: MakeProfile) -> None:
    profile = make_profile([1] * 12)
    best = split(profile, 3, "optimal", Conditions(speeds=(1, 2, 3), num_microbatches=None))
    assert [len(stage.units) for stage in best.stages] == [2, 4, 6]
    assert best.bottleneck_s == 2.0


def test_memory_limit_moves_the_cut(make_profile: MakeProfile) -> None:
    profile = make_profile([1, 1, 1, 1], parameters=[100, 100, 10, 10])
    assert split(profile, 2).cuts == (1,)
    # 4 bytes per parameter for inference: the first stage may hold 400 bytes, the second 480.
    assert split(profile, 2, "optimal", Conditions(memory_limit_bytes=500)).cuts == (0,)
    with pytest.raises(SplitError, match=r"needs 480 bytes on stage 1, 10 bytes more than its limit of 470 bytes"):
        split(profile, 2, "optimal", Conditions(memory_limit_bytes=470))


def test_speed_with_1000_units_and_64_unequal_devices(make_profile: MakeProfile) -> None:
    random = np.random.default_rng(1)
    saved = [Amount(total=1000)] + [Amount(total=1000, shares=((index, 300),)) for index in range(999)]
    profile = make_profile(
        list(random.lognormal(0, 1, 1000) / 1000),
        backward=list(random.lognormal(0, 1, 1000) / 500),
        parameters=[int(size) for size in random.integers(0, 10_000, 1000)],
        crossing=[int(size) for size in random.integers(1, 1_000_000, 1000)],
        saved=saved,
    )
    conditions = Conditions(
        speeds=list(random.uniform(0.5, 2, 64)), bandwidth_bytes_per_s=1e8, latency_s=1e-5, memory_limit_bytes=4_000_000
    )
    start = time.process_time()
    best = split(profile, 64, "optimal", conditions)
    elapsed_s = time.process_time() - start
    assert best.fits
    assert elapsed_s < 6.0  # well under 1 s on an idle core, with a margin for slow and busy ones
    # Better than the policy that ignores links, speeds and memory.
    assert best.bottleneck_s < split(profile, 64, "time", conditions).bottleneck_s
