from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from stagewright.errors import SplitError, UsageError
from stagewright.profile.value import Profile
from stagewright.split import Conditions, compare, find_policy, policy, policy_names, registry, split


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(registry, "_POLICIES", dict(registry._POLICIES))

    @policy("halves")
    def cut_in_the_middle(profile: Profile, num_stages: int, conditions: Conditions) -> Sequence[int]:
        """Cut in the middle.

        Whatever it costs.
        """
        return [len(profile.units) // 2 - 1]

    return "halves"


def test_built_in_policies() -> None:
    assert policy_names() == ("parameters", "macs", "blocks", "time", "optimal", "client-server")
    assert all(find_policy(name).summary for name in policy_names())


def test_a_policy_of_ones_own(halves: str, make_profile: Callable[..., Profile]) -> None:
    profile = make_profile([1, 2, 3, 4])
    assert split(profile, 2, halves).cuts == (1,)
    assert compare(profile, 2)[halves].bottleneck_s == 7
    assert find_policy(halves).summary == "Cut in the middle."
    with pytest.raises(SplitError, match="'halves' makes 2 stages of 'handmade', but 3 were asked for"):
        split(profile, 3, halves)


def test_a_name_is_taken_once() -> None:
    with pytest.raises(UsageError, match="'time' exists already"):
        policy("time")(lambda profile, num_stages, conditions: [])
