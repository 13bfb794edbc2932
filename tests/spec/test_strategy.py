"""Strategies as people name them."""

from __future__ import annotations

import pytest

from stagewright.errors import UsageError
from stagewright.spec.plan import Mesh
from stagewright.spec.strategy import Strategy, parse_strategy


@pytest.mark.parametrize(
    ("text", "mesh", "zero", "shards"),
    [
        ("serial", Mesh(), 0, None),
        ("dp", Mesh(data=4), 0, None),
        ("ddp", Mesh(data=4), 0, None),
        ("tp", Mesh(tensor=4), 0, None),
        ("pp", Mesh(pipeline=4), 0, None),
        ("fsdp", Mesh(data=4), 3, None),
        ("fsdp=2", Mesh(data=2), 3, None),
        ("dp=2,pp=2", Mesh(data=2, pipeline=2), 0, None),
        ("fsdp=2,tp=2", Mesh(data=2, tensor=2), 3, None),
        ("hsdp", Mesh(data=4), 3, 2),
        ("hsdp=8,pp=2", Mesh(data=8, pipeline=2), 3, 4),
        ("zero1", Mesh(data=4), 1, None),
        ("zero2=2,pp=2", Mesh(data=2, pipeline=2), 2, None),
    ],
)
def test_names(text: str, mesh: Mesh, zero: int, shards: int | None) -> None:
    assert parse_strategy(text, 4) == Strategy(mesh, zero, shards)


def test_hsdp_has_groups_of_the_given_size() -> None:
    assert parse_strategy("hsdp", 8, 2) == Strategy(Mesh(data=8), 3, 2)
    with pytest.raises(UsageError, match="2 replicas are not two groups of two or more: use fsdp, or 4 replicas"):
        parse_strategy("hsdp", 2)


def test_an_unknown_one_offers_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown strategy 'fsdb'; did you mean 'fsdp'"):
        parse_strategy("fsdb", 2)


def test_a_mesh_among_strategies_needs_spaces() -> None:
    with pytest.raises(UsageError, match=r"separate them with spaces, like 'serial fsdp=2,pp=2'"):
        parse_strategy("serial,fsdp=2,pp=2", 4)
