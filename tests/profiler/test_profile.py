from __future__ import annotations

import json
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given

from stagewright.profiler.profile import Amount, Profile, Time, UnitProfile, amount_of, amounts_with_shares

ZERO = Time(median_s=0.0, spread_s=0.0)


def unit(name: str = "0", forward_s: float = 1.0, backward_s: float = 2.0, **more: object) -> UnitProfile:
    values: dict[str, object] = {
        "name": name,
        "kind": "Linear",
        "block": None,
        "parameters": Amount(total=10),
        "parameter_bytes": Amount(total=40),
        "buffer_bytes": 3,
        "macs": 8,
        "forward": Time(median_s=forward_s, spread_s=0.1),
        "backward_input": Time(median_s=backward_s, spread_s=0.2),
        "backward_weight": ZERO,
        "output_bytes": 16,
        "saved_bytes": Amount(total=12),
        "recompute_saved_bytes": 8,
        "crossing_bytes": 16,
    }
    return UnitProfile(**{**values, **more})  # type: ignore[arg-type]


def profile(*units: UnitProfile) -> Profile:
    return Profile(
        model="mlp",
        device="cpu:0",
        dtype="float32",
        batch_size=4,
        training=True,
        units=units,
        whole_forward=Time(median_s=2.0, spread_s=0.0),
        whole_backward=Time(median_s=4.0, spread_s=0.0),
        whole_macs=16,
        versions={"torch": "2.13.0"},
    )


def test_range_counts_shares_inside_it_only() -> None:
    amounts = [Amount(total=10), Amount(total=8, shares=((0, 4),)), Amount(total=10, shares=((0, 10),))]
    assert amount_of(amounts, 0, 2) == 14
    assert amount_of(amounts, 1, 2) == 18
    assert amount_of(amounts, 0, 1) == 14
    assert amount_of(amounts, 2, 2) == 10


@given(st.lists(st.sets(st.integers(0, 6)), min_size=1, max_size=8), st.data())
def test_any_range_equals_the_union(holders: list[set[int]], data: st.DataObject) -> None:
    amounts = amounts_with_shares([{thing: 2**thing for thing in things} for things in holders])
    first = data.draw(st.integers(0, len(holders) - 1))
    last = data.draw(st.integers(first, len(holders) - 1))
    union = set().union(*holders[first : last + 1])
    assert amount_of(amounts, first, last) == sum(2**thing for thing in union)


def test_sums_of_a_profile() -> None:
    tied = unit("1", parameters=Amount(total=10, shares=((0, 4),)), saved_bytes=Amount(total=9, shares=((0, 9),)))
    both = profile(unit(), tied)
    assert both.coverage == 1.0
    assert both.parameters == 16
    assert both.saved_bytes == 12
    assert both.units[0].total_s == 3.0


def test_json_gives_the_same_profile() -> None:
    both = profile(unit(), unit("1", block="layer.0", parameters=Amount(total=10, shares=((0, 4),))))
    assert Profile.from_dict(json.loads(json.dumps(both.to_dict()))) == both


def test_json_keys_of_saved_activations_keep_their_names() -> None:
    data = unit(saved_bytes=Amount(total=9), recompute_saved_bytes=3).to_dict()
    assert (data["kept_bytes"]["total"], data["recompute_kept_bytes"]) == (9, 3)
    assert unit(saved_bytes=Amount(total=9)).kept_bytes == Amount(total=9)


def test_table_has_a_row_per_unit_and_totals() -> None:
    both = profile(unit(), unit("1"))
    table = both.table()
    assert [str(row[0]) for row in table.rows] == [unit().name, "1", "2 units"]
    labels = [column.label for column in table.columns]
    assert labels[2:4] == ["parameters", "MACs"]
    assert str(table.rows[-1][labels.index("saved activations")]) == "24 B"
    assert str(both) == str(table)
    assert "whole model: forward 2.00 s, backward 4.00 s" in str(both)
    assert both._repr_html_().count("<tr>") == 4
    assert "backward" not in str(replace(both, training=False).table().to_dict()["columns"])
