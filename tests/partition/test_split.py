from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from stagewright.errors import SplitError, UnknownName, UsageError
from stagewright.partition import Conditions, compare, split, split_at
from stagewright.profiler.profile import Profile

MakeProfile = Callable[..., Profile]


@pytest.fixture(scope="module")
def profile(make_profile: MakeProfile) -> Profile:
    return make_profile(
        [1, 2, 2, 2, 1],
        backward=[2, 4, 4, 4, 2],
        parameters=[50, 10, 10, 10, 5],
        macs=[1, 8, 8, 8, 1],
        crossing=[64, 64, 64, 64, 0],
        blocks=[None, "block.0", "block.1", "block.2", None],
        names=["stem", "block.0", "block.1", "block.2", "head"],
    )


def test_all_policies_side_by_side(profile: Profile) -> None:
    comparison = compare(profile, 3)
    assert {one.policy: one.cut_names for one in comparison} == {
        "parameters": ("stem", "block.1"),
        "macs": ("block.0", "block.1"),
        "blocks": ("block.0", "block.1"),
        "time": ("block.0", "block.1"),
        "client-server": ("stem", "block.1"),
        "optimal": ("block.0", "block.1"),
    }
    assert comparison["optimal"].bottleneck_s == 9.0
    assert comparison[0].policy == "parameters"
    assert len(comparison) == 6


def test_json_has_the_documented_keys(profile: Profile) -> None:
    data = json.loads(json.dumps(compare(profile, 2).to_dict()))
    assert set(data) == {"policies", "skipped"}
    for one in data["policies"]:
        assert {"policy", "bottleneck_s", "stages", "cut_names", "balance", "speedup_bound", "step_s"} <= set(one)
        for stage in one["stages"]:
            assert {
                "units",
                "parameters",
                "macs",
                "forward_s",
                "backward_s",
                "sends_bytes",
                "memory_bytes",
            } <= set(stage)
    assert [stage["units"] for stage in data["policies"][4]["stages"]] == [
        ["stem", "block.0"],
        ["block.1", "block.2", "head"],
    ]


def test_what_cannot_be_applied_is_left_out_with_its_reason(make_profile: MakeProfile) -> None:
    comparison = compare(make_profile([1, 1], parameters=[1, 1], macs=[1, 1]), 2)
    assert [one.policy for one in comparison] == ["parameters", "macs", "time", "optimal"]
    reasons = {one.policy: one.reason for one in comparison.skipped}
    assert "no repeated blocks" in reasons["blocks"]
    assert "2 units" in reasons["client-server"]
    with pytest.raises(UnknownName, match="unknown policy 'blocks'"):
        comparison["blocks"]
    one_stage = compare(make_profile([1, 1, 1], parameters=[1, 1, 1]), 1)
    assert "needs 2 devices" in {one.policy: one.reason for one in one_stage.skipped}["client-server"]


def test_a_policy_that_was_named_must_be_possible(make_profile: MakeProfile) -> None:
    with pytest.raises(SplitError, match="no repeated blocks"):
        compare(make_profile([1, 1]), 2, ["time", "blocks"])
    with pytest.raises(UnknownName, match="did you mean 'optimal'"):
        compare(make_profile([1, 1]), 2, ["optimum"])


def test_a_limit_that_nothing_fits_fails_the_whole_comparison(profile: Profile) -> None:
    with pytest.raises(SplitError, match="more than its limit of 10 bytes"):
        compare(profile, 2, conditions=Conditions(memory_limit_bytes=10))


@pytest.mark.parametrize("num_stages", [0, -3])
def test_too_few_stages(profile: Profile, num_stages: int) -> None:
    with pytest.raises(SplitError, match=f"{num_stages} stages were asked for, but a model has at least 1"):
        split(profile, num_stages)


def test_too_many_stages(profile: Profile) -> None:
    with pytest.raises(SplitError, match="6 stages were asked for, but 'handmade' has 5 units"):
        compare(profile, 6)


def test_speeds_for_another_number_of_devices(profile: Profile) -> None:
    with pytest.raises(UsageError, match="2 speeds were given for 3 devices"):
        split(profile, 3, conditions=Conditions(speeds=(1, 2)))


def test_named_cuts(profile: Profile) -> None:
    result = split_at(profile, ["block.1", "stem"])
    assert (result.policy, result.cuts) == ("cuts", (0, 2))
    with pytest.raises(SplitError, match="7 stages were asked for"):
        split_at(profile, ["stem"] * 6)
