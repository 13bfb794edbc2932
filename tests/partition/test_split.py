from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from stagewright.errors import SplitError, UnknownName, UsageError
from stagewright.partition import Conditions, compare, split, split_at
from stagewright.partition.split import cuts_by_name
from stagewright.profiler.profile import Profile, StageTime, Time
from stagewright.table import Cell

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


def test_comparison_of_all_policies(profile: Profile) -> None:
    comparison = compare(profile, 3)
    assert {split.policy: split.cut_names for split in comparison} == {
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
    for policy in data["policies"]:
        assert {"policy", "bottleneck_s", "stages", "cut_names", "balance", "speedup_bound", "step_s"} <= set(policy)
        for stage in policy["stages"]:
            assert {"units", "parameters", "macs", "forward_s", "backward_s", "sends_bytes", "memory_bytes"} <= set(
                stage
            )
    assert [stage["units"] for stage in data["policies"][4]["stages"]] == [
        ["stem", "block.0"],
        ["block.1", "block.2", "head"],
    ]


def test_inapplicable_policies_are_skipped_with_a_reason(make_profile: MakeProfile) -> None:
    comparison = compare(make_profile([1, 1], parameters=[1, 1], macs=[1, 1]), 2)
    assert [split.policy for split in comparison] == ["parameters", "macs", "time", "optimal"]
    reasons = {skipped.policy: skipped.reason for skipped in comparison.skipped}
    assert "no repeated blocks" in reasons["blocks"]
    assert "2 units" in reasons["client-server"]
    with pytest.raises(UnknownName, match="unknown policy 'blocks'"):
        comparison["blocks"]
    one_stage = compare(make_profile([1, 1, 1], parameters=[1, 1, 1]), 1)
    assert "needs 2 devices" in {skipped.policy: skipped.reason for skipped in one_stage.skipped}["client-server"]


def test_a_requested_policy_must_be_applicable(make_profile: MakeProfile) -> None:
    with pytest.raises(SplitError, match="no repeated blocks"):
        compare(make_profile([1, 1]), 2, ["time", "blocks"])
    with pytest.raises(UnknownName, match="did you mean 'optimal'"):
        compare(make_profile([1, 1]), 2, ["optimum"])


def test_a_limit_that_nothing_fits_fails_the_whole_comparison(profile: Profile) -> None:
    with pytest.raises(SplitError, match="more than its limit of 10 bytes"):
        compare(profile, 2, conditions=Conditions(memory_limit_bytes=10))


@pytest.mark.parametrize("num_stages", [0, -3])
def test_too_few_stages(profile: Profile, num_stages: int) -> None:
    with pytest.raises(SplitError, match=f"{num_stages} stages are not possible: give a number from 1 to 5"):
        split(profile, num_stages)


def test_too_many_stages(profile: Profile) -> None:
    with pytest.raises(SplitError, match="6 stages are not possible: 'handmade' has 5 units"):
        compare(profile, 6)


def test_speeds_for_another_number_of_devices(profile: Profile) -> None:
    with pytest.raises(UsageError, match="2 speeds were given for 3 devices"):
        split(profile, 3, conditions=Conditions(speeds=(1, 2)))


def test_named_cuts(profile: Profile) -> None:
    result = split_at(profile, ["block.1", "stem"])
    assert (result.policy, result.cuts) == ("cuts", (0, 2))
    with pytest.raises(SplitError, match="7 stages are not possible"):
        split_at(profile, ["stem"] * 6)


def test_tables_of_a_comparison(profile: Profile) -> None:
    comparison = compare(profile, 3)
    assert [table.title for table in comparison.split_tables()] == [
        "parameters: cut after stem, block.1",
        "macs, blocks, time, optimal: cut after block.0, block.1",
        "client-server: cut after stem, block.1",
    ]
    best = comparison["optimal"]
    table = best.table()
    assert [str(row[1]) for row in table.rows] == ["stem … block.0 (2)", "block.1", "block.2 … head (2)"]
    bold = [isinstance(row[0], Cell) and row[0].tone == "strong" for row in table.rows]
    assert bold == [True, False, True], "the bottleneck stages"
    assert table.notes == ("bottleneck 9.00 s, balance 0.89, speed-up bound 2.21 × with 8 micro-batches",)
    assert str(best) == str(table)
    assert str(comparison.table().rows[0][0]) == "optimal"
    assert "<table>" in comparison._repr_html_()


def test_measured_times_are_a_column(profile: Profile) -> None:
    comparison = compare(profile, 2, ["time"])
    measured = [[StageTime(forward=Time(median_s=2.0, spread_s=0), backward_s=3.0, backward_spread_s=0)] * 2]
    for table in (*comparison.split_tables(measured), comparison.table(measured)):
        index = [column.label for column in table.columns].index("measured")
        assert str(table.rows[0][index]) == "5.00 s"


@pytest.fixture(scope="module")
def leaves(make_profile: MakeProfile) -> Profile:
    names = ["embed", "layer.0.attention", "layer.0.mlp", "layer.1.attention", "layer.1.mlp", "head"]
    return make_profile([1] * 6, names=names, blocks=[None, "layer.0", "layer.0", "layer.1", "layer.1", None])


def test_cuts_after_units_and_blocks(leaves: Profile) -> None:
    assert cuts_by_name(leaves, ["layer.0", "embed"]) == (0, 2)
    assert cuts_by_name(leaves, ["layer.1.attention"]) == (3,)
    assert cuts_by_name(leaves, []) == ()


def test_a_unit_takes_precedence_over_a_block_of_the_same_name(make_profile: MakeProfile) -> None:
    shared = make_profile([1] * 3, names=["layer", "layer@2", "head"], blocks=["layer", "layer", None])
    assert cuts_by_name(shared, ["layer"]) == (0,)


def test_wrong_names_of_cuts(leaves: Profile) -> None:
    with pytest.raises(UnknownName, match=r"unknown unit or block 'layer.2'; did you mean 'layer.1' or 'layer.0'"):
        cuts_by_name(leaves, ["layer.2"])
    with pytest.raises(SplitError, match="'head' is the last unit"):
        cuts_by_name(leaves, ["head"])
    with pytest.raises(SplitError, match=r"'layer.0.mlp' and 'layer.0' are the same cut"):
        cuts_by_name(leaves, ["layer.0", "layer.0.mlp"])
