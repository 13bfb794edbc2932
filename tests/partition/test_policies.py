from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from stagewright.errors import SplitError
from stagewright.partition import Conditions, compare, policy_names, split
from stagewright.partition.policies import block_runs
from stagewright.profiler.profile import Amount, Profile

MakeProfile = Callable[..., Profile]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_policy_covers_every_unit_once(make_profile: MakeProfile, data: st.DataObject) -> None:
    num_units = data.draw(st.integers(1, 14), label="units")
    num_stages = data.draw(st.integers(1, num_units), label="stages")

    def column(high: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, high), min_size=num_units, max_size=num_units))

    profile = make_profile(
        column(9),
        backward=column(9),
        parameters=column(9),
        macs=column(9),
        crossing=column(9),
        blocks=data.draw(st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=num_units, max_size=num_units)),
    )
    comparison = compare(profile, num_stages)
    names = tuple(unit.name for unit in profile.units)
    for result in comparison:
        assert tuple(itertools.chain.from_iterable(stage.units for stage in result.stages)) == names
        assert all(stage.units for stage in result.stages)
        assert result.num_stages == (3 if result.policy == "client-server" else num_stages)
    done = [result.policy for result in (*comparison, *comparison.skipped)]
    assert sorted(done) == sorted(policy_names())
    # On equal devices with free links no policy with one device per stage beats the optimal one.
    bottlenecks = [result.bottleneck_s for result in comparison if result.policy != "client-server"]
    assert comparison["optimal"].bottleneck_s == pytest.approx(min(bottlenecks))
    assert comparison["time"].bottleneck_s == pytest.approx(min(bottlenecks))


@settings(max_examples=60, deadline=None)
@given(macs=st.lists(st.integers(0, 20), min_size=2, max_size=8), num_stages=st.integers(2, 4))
def test_macs_equals_brute_force(make_profile: MakeProfile, macs: list[int], num_stages: int) -> None:
    if num_stages > len(macs) or sum(macs) == 0:
        return
    best = split(make_profile([1] * len(macs), macs=macs), num_stages, "macs")
    largest = min(
        max(sum(macs[start:end]) for start, end in itertools.pairwise((0, *cuts, len(macs))))
        for cuts in itertools.combinations(range(1, len(macs)), num_stages - 1)
    )
    assert max(stage.macs for stage in best.stages) == largest


@pytest.mark.parametrize(
    ("parameters", "num_stages", "cuts"),
    [
        ([1, 1, 1, 1], 2, (1,)),
        ([3, 3, 3, 3], 4, (0, 1, 2)),
        # The threshold is 5: unit 2 would take the first stage to 6; the last stage gets the rest.
        ([2, 2, 2, 2, 2], 2, (1,)),
        # Above the threshold of 8 by itself: a stage by itself, and the rest is never cut further.
        ([20, 1, 1, 2], 3, (0, 2)),
        # Units without parameters stay with the unit before them, unless that is already too large.
        ([4, 0, 4, 0], 2, (1,)),
        ([4, 0, 3, 0], 2, (0,)),
        # All units but the last fit in one stage: the original returns two stages, here there are three.
        ([1, 1, 1, 97], 3, (1, 2)),
        ([0, 0, 0, 5], 4, (0, 1, 2)),
    ],
)
def test_parameters_fills_each_stage_up_to_its_share(
    make_profile: MakeProfile, parameters: list[int], num_stages: int, cuts: tuple[int, ...]
) -> None:
    assert split(make_profile([1] * len(parameters), parameters=parameters), num_stages, "parameters").cuts == cuts


def test_parameters_counts_shared_ones_once_per_stage(make_profile: MakeProfile) -> None:
    # The second unit is the first one called again: in one stage they are 6, not 12.
    shared = [6, Amount(total=6, shares=((0, 6),)), 6]
    best = split(make_profile([1, 1, 1], parameters=shared), 2, "parameters")
    assert best.cuts == (1,)
    assert [stage.parameters for stage in best.stages] == [6, 6]


def test_policies_without_their_measure_are_rejected(make_profile: MakeProfile) -> None:
    bare = make_profile([1, 1, 1])
    for name, reason in (
        ("parameters", "no parameters"),
        ("macs", "no multiply-accumulates"),
        ("blocks", "no repeated blocks"),
    ):
        with pytest.raises(SplitError, match=reason):
            split(bare, 2, name)


def test_blocks_cuts_on_block_borders_only(make_profile: MakeProfile) -> None:
    # stem, five blocks of two leaves, something between the last two, head
    blocks = [None, "0", "0", "1", "1", "2", "2", "3", "3", None, "4", "4", None]
    profile = make_profile([1] * len(blocks), blocks=blocks)
    best = split(profile, 3, "blocks")
    # 5 blocks in 3 stages: 2, 2, 1 would favor the first; remaining ones go to the middle if possible.
    assert [stage.units for stage in best.stages] == [
        ("unit0", "unit1", "unit2", "unit3", "unit4"),
        ("unit5", "unit6", "unit7", "unit8", "unit9"),
        ("unit10", "unit11", "unit12"),
    ]
    assert [len(stage.units) for stage in split(profile, 5, "blocks").stages] == [3, 2, 2, 3, 3]
    with pytest.raises(SplitError, match="5 repeated blocks, too few for 6 stages: use at most 5 stages"):
        split(profile, 6, "blocks")


def test_a_remaining_block_goes_to_the_middle(make_profile: MakeProfile) -> None:
    profile = make_profile([1] * 13, blocks=[str(index) for index in range(13)])
    assert [len(stage.units) for stage in split(profile, 4, "blocks").stages] == [3, 4, 3, 3]


def test_a_block_that_is_called_twice_counts_twice(make_profile: MakeProfile) -> None:
    whole = make_profile([1] * 3, blocks=["layer"] * 3, names=["layer", "layer@2", "layer@3"])
    assert block_runs(whole.units) == [(0, 0), (1, 1), (2, 2)]
    # Leaves of a block that is called twice, with an activation that is called twice inside it.
    names = ["l.a", "l.relu", "l.b", "l.relu@2", "l.a@2", "l.relu@3", "l.b@2", "l.relu@4"]
    leaves = make_profile([1] * 8, blocks=["l"] * 8, names=names)
    assert block_runs(leaves.units) == [(0, 3), (4, 7)]


def test_time_is_forward_alone_for_inference(make_profile: MakeProfile) -> None:
    profile = make_profile([1, 1, 1, 3], backward=[9, 1, 1, 1])
    assert split(profile, 2, "time").cuts == (0,)
    assert split(profile, 2, "time", Conditions(training=False)).cuts == (2,)
