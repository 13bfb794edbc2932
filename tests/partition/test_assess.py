from __future__ import annotations

from collections.abc import Callable

import pytest

from stagewright.errors import SplitError, UsageError
from stagewright.partition import Conditions, assess
from stagewright.profiler.profile import Amount, Profile

MakeProfile = Callable[..., Profile]


def test_numbers_of_a_training_split(make_profile: MakeProfile) -> None:
    profile = make_profile([1, 2, 3], backward=[2, 4, 6], macs=[5, 6, 7], crossing=[10, 20, 0], parameters=[1, 2, 3])
    conditions = Conditions(num_microbatches=4, bandwidth_bytes_per_s=10, latency_s=0.5, speeds=(1, 2))
    result = assess(profile, "by hand", [0], conditions)
    first, second = result.stages
    assert (first.forward_s, first.backward_s, first.link_s, first.time_s) == (1, 2, 2 * (0.5 + 1), 6)
    assert (second.forward_s, second.backward_s, second.link_s, second.time_s) == (2.5, 5, 0, 7.5)
    assert (first.sends_bytes, second.sends_bytes) == (10, 0)
    assert (first.in_flight, second.in_flight) == (2, 1)
    assert (first.macs, second.macs) == (5, 13)
    assert result.bottleneck_s == 7.5
    assert result.step_s == 13.5 + 3 * 7.5
    assert result.balance == pytest.approx(6.75 / 7.5)
    # Baseline on the fastest device alone: 18 s of work at speed 2.
    assert result.serial_s == 9.0
    assert result.speedup_bound == pytest.approx(4 * 9 / 36)


def test_endless_stream_is_bound_by_the_slowest_stage(make_profile: MakeProfile) -> None:
    result = assess(make_profile([1, 2, 3]), "by hand", [1], Conditions(num_microbatches=None))
    assert result.step_s is None
    assert result.speedup_bound == 2.0
    assert assess(make_profile([1, 2, 3]), "by hand", [1], Conditions(num_microbatches=1)).speedup_bound == 1.0


def test_recompute_costs_a_forward_pass(make_profile: MakeProfile) -> None:
    profile = make_profile([1, 2], backward=[3, 4])
    result = assess(profile, "by hand", [0], Conditions(recompute=True))
    assert [stage.backward_s for stage in result.stages] == [4, 6]
    assert result.serial_s == 10


def test_overlapped_links_count_once(make_profile: MakeProfile) -> None:
    profile = make_profile([1, 2], crossing=[30, 0])
    result = assess(profile, "by hand", [0], Conditions(bandwidth_bytes_per_s=10, overlap_links=True))
    assert [stage.busy_s for stage in result.stages] == [3, 2]
    assert [stage.time_s for stage in result.stages] == [4, 2]


def test_a_tied_weight_counts_once_on_a_device_with_both_ends(make_profile: MakeProfile) -> None:
    tied = [100, 5, Amount(total=100, shares=((0, 100),))]
    profile = make_profile([1, 1, 1], parameters=tied)
    apart = assess(profile, "by hand", [0, 1], Conditions())
    together = assess(profile, "by hand", [0, 1], Conditions(), placement=(0, 1, 0))
    assert [device.memory_bytes for device in apart.devices] == [400, 20, 400]
    assert [device.memory_bytes for device in together.devices] == [400, 20]


def test_fits_compares_with_each_limit(make_profile: MakeProfile) -> None:
    profile = make_profile([1, 1], parameters=[10, 20])
    assert assess(profile, "by hand", [0], Conditions(memory_limit_bytes=(40, 80))).fits
    assert not assess(profile, "by hand", [0], Conditions(memory_limit_bytes=(40, 79))).fits


@pytest.mark.parametrize("cuts", [[2], [-1], [0, 0], [1, 0]])
def test_impossible_cuts_are_rejected(make_profile: MakeProfile, cuts: list[int]) -> None:
    with pytest.raises(SplitError, match=r"must be increasing and within 0 … 1 for 3 units"):
        assess(make_profile([1, 1, 1]), "by hand", cuts, Conditions())


@pytest.mark.parametrize("placement", [[0], [0, 2], [1, 1]])
def test_impossible_placements_are_rejected(make_profile: MakeProfile, placement: list[int]) -> None:
    with pytest.raises(SplitError, match="one device per stage"):
        assess(make_profile([1, 1]), "by hand", [0], Conditions(), placement)


def test_training_needs_backward_times(make_profile: MakeProfile) -> None:
    with pytest.raises(UsageError, match="profile the model for training"):
        assess(make_profile([1, 1]), "by hand", [0], Conditions(training=True))
