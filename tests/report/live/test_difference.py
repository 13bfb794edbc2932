"""A viewer who applies what it is sent has what the server has."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st

from stagewright.report.live.difference import apply, difference

workers = st.lists(
    st.fixed_dictionaries({"kind": st.sampled_from("abc"), "step": st.integers(0, 2)}), min_size=0, max_size=3
)
states = st.fixed_dictionaries(
    {
        "name": st.sampled_from("xy"),
        "step": st.none() | st.integers(0, 3),
        "workers": workers,
        "curve": st.lists(st.tuples(st.integers(0, 1)).map(list), max_size=4),
    }
)


@given(states, states)
def test_the_law(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert apply(before, difference(before, after)) == after


@given(states)
def test_nothing_new_is_nothing_sent(state: dict[str, Any]) -> None:
    assert difference(state, state) == {}


def test_only_what_changed() -> None:
    before = {"step": 1, "workers": [{"kind": "a", "rank": 0}, {"kind": "a", "rank": 1}], "curve": [[1, 2.0]]}
    after = {"step": 1, "workers": [{"kind": "a", "rank": 0}, {"kind": "b", "rank": 1}], "curve": [[1, 2.0], [2, 1.0]]}
    assert difference(before, after) == {"workers": {"1": {"kind": "b"}}, "curve": {"add": [[2, 1.0]]}}
