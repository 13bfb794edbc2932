from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from stagewright import partition
from stagewright.errors import SplitError, UsageError
from stagewright.partition import Conditions, compare, find_policy, policy, policy_names, registry, split
from stagewright.profiler.profile import Profile
from stagewright.spec.local_check import check_user_code
from stagewright.spec.plan_file import plan_from_table


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


def test_registered_policy(halves: str, make_profile: Callable[..., Profile]) -> None:
    profile = make_profile([1, 2, 3, 4])
    assert split(profile, 2, halves).cuts == (1,)
    assert compare(profile, 2)[halves].bottleneck_s == 7
    assert find_policy(halves).summary == "Cut in the middle."
    with pytest.raises(SplitError, match="'halves' returned 2 stages of 'handmade' instead of 3"):
        split(profile, 3, halves)


USER_MODULE = """
import numpy as np
from stagewright.partition import Placed, policy

def halves(profile, num_stages, conditions):
    "Cut in the middle."
    return np.array([len(profile.units) // 2 - 1])

@policy("on-one-device", num_devices=1)
def placed(profile, num_stages, conditions):
    return Placed(cuts=[0], placement=[0, 0])

def fails(profile, num_stages, conditions):
    return profile.units["first"]

def names(profile, num_stages, conditions):
    return ["fc1"]

number = 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_policies.py").write_text(USER_MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(registry, "_POLICIES", dict(registry._POLICIES))
    sys.modules.pop("my_policies", None)


def test_a_policy_named_with_its_module(user_module: None, make_profile: Callable[..., Profile]) -> None:
    profile = make_profile([1, 2, 3, 4])
    result = split(profile, 2, "my_policies:halves")
    assert (result.policy, result.cuts) == ("my_policies:halves", (1,))
    assert find_policy("my_policies:halves").summary == "Cut in the middle."
    assert find_policy("my_policies:placed").num_devices == 1
    assert split(profile, 2, "my_policies:placed").placement == (0, 0)
    table = {"batch": 8, "microbatches": 4, "model": {"name": "mlp-mnist"}, "mesh": {"pipeline": 2}}
    assert plan_from_table({**table, "split": "my_policies:halves"}).split == "my_policies:halves"
    missing = plan_from_table({**table, "split": "my_policies:halfs"})
    with pytest.raises(UsageError, match="unknown policy 'halfs'; did you mean 'halves'"):
        check_user_code(missing)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("not_mine:halves", "no module named 'not_mine' for the policy 'not_mine:halves'"),
        ("my_policies.py:halves", "'my_policies.py' is a file, not a module; write my_policies:halves"),
        ("my_policies:number", "'my_policies:number' is a value of type int, not a policy; name a function"),
        ("my_policies:fails", r"the policy 'my_policies:fails' failed: TypeError: .*my_policies.py, line 14\)"),
        (
            "my_policies:names",
            "the policy 'my_policies:names' returned a value of type list; it must return the indices",
        ),
    ],
)
def test_errors_of_user_policies(user_module: None, make_profile: Callable[..., Profile], name: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        split(make_profile([1, 2, 3, 4]), 2, name)


def test_names_are_unique() -> None:
    with pytest.raises(UsageError, match="'time' is registered already"):
        policy("time")(lambda profile, num_stages, conditions: [])


def test_former_names_still_work() -> None:
    assert partition.Placed is partition.PlacedCuts
    assert partition.Policy is partition.RegisteredPolicy
    assert partition.Skipped is partition.SkippedPolicy
