"""Strategies as people name them."""

from __future__ import annotations

import pytest

from stagewright.errors import UsageError
from stagewright.spec.plan import Mesh
from stagewright.spec.strategy import parse_strategy


@pytest.mark.parametrize(
    ("text", "mesh", "is_fsdp"),
    [
        ("serial", Mesh(), False),
        ("dp", Mesh(data=4), False),
        ("ddp", Mesh(data=4), False),
        ("tp", Mesh(tensor=4), False),
        ("pp", Mesh(pipeline=4), False),
        ("fsdp", Mesh(data=4), True),
        ("fsdp=2", Mesh(data=2), True),
        ("dp=2,pp=2", Mesh(data=2, pipeline=2), False),
        ("fsdp=2,tp=2", Mesh(data=2, tensor=2), True),
    ],
)
def test_names(text: str, mesh: Mesh, is_fsdp: bool) -> None:
    assert parse_strategy(text, 4) == (mesh, is_fsdp)


def test_an_unknown_one_offers_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown strategy 'fsdb'; did you mean 'fsdp'"):
        parse_strategy("fsdb", 2)
