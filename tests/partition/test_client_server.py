from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from stagewright.errors import SplitError
from stagewright.partition import Conditions, assess, split
from stagewright.profiler.profile import Profile

MakeProfile = Callable[..., Profile]


def test_client_server_uses_two_devices(make_profile: MakeProfile) -> None:
    profile = make_profile([1, 2, 3, 4, 5, 6], crossing=[10, 20, 30, 40, 50, 0])
    conditions = Conditions(client_first=2, client_last=1, num_microbatches=4)
    best = split(profile, 2, "client-server", conditions)
    assert best.placement == (0, 1, 0)
    assert best.cut_names == ("unit1", "unit4")
    assert [device.busy_s for device in best.devices] == [9.0, 12.0]
    assert best.bottleneck_s == 12.0
    assert best.balance == pytest.approx(10.5 / 12)
    assert best.step_s == 21 + 3 * 12
    for first, last in ((0, 1), (1, 0), (3, 3)):
        with pytest.raises(SplitError, match=f"first {first} and the last {last} of the 6 units"):
            split(profile, 2, "client-server", Conditions(client_first=first, client_last=last))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_default_is_the_best_pair(make_profile: MakeProfile, data: st.DataObject) -> None:
    num_units = data.draw(st.integers(3, 8))
    column = st.lists(st.integers(0, 9), min_size=num_units, max_size=num_units)
    profile = make_profile(data.draw(column), backward=data.draw(column), crossing=data.draw(column))
    conditions = Conditions(
        num_microbatches=data.draw(st.sampled_from([None, 1, 4])),
        speeds=data.draw(st.none() | st.tuples(*[st.sampled_from([0.5, 1.0, 2.0])] * 2)),
        bandwidth_bytes_per_s=data.draw(st.sampled_from([None, 2.0])),
        overlap_links=data.draw(st.booleans()),
        client_last=data.draw(st.none() | st.just(1)),
    )
    most = num_units if conditions.client_last is None else 2
    splits = [
        assess(profile, "by hand", (first - 1, num_units - last - 1), conditions, (0, 1, 0))
        for first in range(1, num_units)
        for last in range(1, most)
        if first + last < num_units
    ]
    best = split(profile, 2, "client-server", conditions)
    assert best.placement == (0, 1, 0)
    if conditions.num_microbatches is None:
        assert best.bottleneck_s == pytest.approx(min(candidate.bottleneck_s for candidate in splits))
    else:
        assert best.step_s == pytest.approx(min(candidate.step_s or 0.0 for candidate in splits))
