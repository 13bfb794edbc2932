from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from stagewright.errors import UsageError
from stagewright.files.toml_table import (
    load_toml,
    rate,
    read_table,
    seconds,
    size,
    text,
    to_toml,
    write_rate,
    write_seconds,
    write_size,
)


def test_a_key_that_is_there_twice(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("batch = 8\nbatch = 9\n")
    with pytest.raises(UsageError, match=r"at line 2, .*; a key or a table is defined twice, keep one"):
        load_toml(tmp_path / "plan.toml")


plain: st.SearchStrategy[Any] = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
keys = st.text("abcdefgh_-0123456789", min_size=1, max_size=8)
tables: st.SearchStrategy[Any] = st.recursive(
    st.dictionaries(keys, plain | st.lists(plain, max_size=4), max_size=4),
    lambda inner: st.dictionaries(keys, inner | st.lists(inner, min_size=1, max_size=3), max_size=3),
    max_leaves=8,
)


@given(tables)
def test_written_tables_read_the_same(table: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(table)) == table


def test_how_it_looks() -> None:
    content = {
        "a": 1,
        "b": ["x", "y"],
        "c": None,
        "links": {"near": {"latency": "1us"}},
        "devices": [{"k": 1}, {"k": 2}],
    }
    assert to_toml(content) == (
        'a = 1\nb = ["x", "y"]\n\n[links.near]\nlatency = "1us"\n\n[[devices]]\nk = 1\n\n[[devices]]\nk = 2\n'
    )


@given(st.integers(0, 2**70))
def test_sizes(num_bytes: int) -> None:
    assert size(write_size(num_bytes), "here") == num_bytes


@given(st.floats(1e-12, 1e30))
def test_rates_and_times(value: float) -> None:
    assert rate(write_rate(value), "here") == value
    assert seconds(write_seconds(value), "here") == value


def test_quantities_as_people_write_them() -> None:
    assert write_size(3 * 2**29) == "1536MiB"
    assert write_size(1000) == 1000
    assert write_rate(1.25e9) == "1.25GB/s"
    assert write_seconds(5e-5) == "50us"
    assert write_seconds(0.0) == 0.0
    assert rate("10Gbit/s", "here") == 1.25e9
    assert seconds(2, "here") == 2.0


def test_wrong_quantities_name_their_place() -> None:
    with pytest.raises(UsageError, match=r"^cluster.toml: latency: '5 miles' is not a time; write it like 50us"):
        seconds("5 miles", "cluster.toml: latency")
    with pytest.raises(UsageError, match=r"^here must be a whole number, not 1.5"):
        size(1.5, "here")


def test_a_table_is_a_table() -> None:
    with pytest.raises(UsageError, match=r"^here must be a table, not \[1, 2\]"):
        read_table([1, 2], {"a": text}, "here")
