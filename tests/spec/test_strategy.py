"""Strategies as people name them."""

from __future__ import annotations

import pytest

from stagewright.errors import UsageError
from stagewright.spec.plan import Mesh
from stagewright.spec.strategy import parse_strategy


@pytest.mark.parametrize(
    ("text", "mesh", "zero"),
    [
        ("serial", Mesh(), 0),
        ("dp", Mesh(data=4), 0),
        ("ddp", Mesh(data=4), 0),
        ("tp", Mesh(tensor=4), 0),
        ("pp", Mesh(pipeline=4), 0),
        ("fsdp", Mesh(data=4), 3),
        ("fsdp=2", Mesh(data=2), 3),
        ("dp=2,pp=2", Mesh(data=2, pipeline=2), 0),
        ("fsdp=2,tp=2", Mesh(data=2, tensor=2), 3),
        ("zero1", Mesh(data=4), 1),
        ("zero2=2,pp=2", Mesh(data=2, pipeline=2), 2),
    ],
)
def test_names(text: str, mesh: Mesh, zero: int) -> None:
    assert parse_strategy(text, 4) == (mesh, zero)


def test_an_unknown_one_offers_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown strategy 'fsdb'; did you mean 'fsdp'"):
        parse_strategy("fsdb", 2)
