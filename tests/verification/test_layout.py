"""Shards of DTensors are put together as their placements say."""

from __future__ import annotations

import pytest
import torch

from stagewright.verification.layout import Layout, join_parts

WHOLE = torch.arange(48.0).reshape(8, 6)


def layout(placements: tuple[str, ...], coordinate: tuple[int, ...]) -> Layout:
    return Layout(placements=placements, mesh=(2,) * len(placements), coordinate=coordinate)


def test_shards_of_one_dimension_may_be_uneven() -> None:
    parts = [(layout(("shard:0",), (1,)), WHOLE[5:]), (layout(("shard:0",), (0,)), WHOLE[:5])]
    assert torch.equal(join_parts(parts), WHOLE)


def test_partial_sums_are_added_and_averages_divided() -> None:
    for operation, expected in (("sum", 3 * WHOLE), ("avg", 1.5 * WHOLE)):
        parts = [(layout((f"partial:{operation}",), (rank,)), WHOLE * (rank + 1)) for rank in range(2)]
        assert torch.equal(join_parts(parts), expected)


@pytest.mark.parametrize("strided", [False, True])
def test_two_mesh_dimensions_of_one_tensor_dimension(strided: bool) -> None:
    """The later mesh dimension divides inside the earlier one, except where FSDP2 shards a tensor-parallel shard."""
    parts = []
    for first in range(2):
        for second in range(2):
            outer, inner = (second, first) if strided else (first, second)
            placements = ("strided:0" if strided else "shard:0", "shard:0")
            parts.append((layout(placements, (first, second)), WHOLE.chunk(2)[outer].chunk(2)[inner]))
    assert torch.equal(join_parts(parts), WHOLE)
