"""A smaller batch is split into fewer micro-batches of about the usual size."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from stagewright.engine.batch.microbatch import microbatch_layout
from stagewright.engine.batch.splitter import count_microbatches
from stagewright.spec.plan import Mesh, ModelSpec, Plan


def sizes(size: int, batch: int, most: int, data: int = 1, shard: bool = False) -> list[list[int]]:
    """Samples of each replica's micro-batches of a batch of ``size`` under a plan for ``batch``."""
    plan = Plan(model=ModelSpec(name="m"), batch=batch, microbatches=most, mesh=Mesh(data=data), shard=shard)
    num = count_microbatches(size, plan)
    return [
        [part.num_samples for part in microbatch_layout(size, num, data=data, replica=replica_index)]
        for replica_index in range(data)
    ]


@pytest.mark.parametrize(
    ("size", "batch", "most", "expected"),
    [(9, 68, 8, [5, 4]), (68, 68, 8, [9] * 4 + [8] * 4), (3, 16, 8, [3]), (5, 16, 8, [3, 2]), (3, 8, 8, [1, 1, 1])],
)
def test_numbers(size: int, batch: int, most: int, expected: list[int]) -> None:
    assert sizes(size, batch, most) == [expected]


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 12), st.integers(1, 4))
def test_sizes_match_those_of_a_full_batch(size: int, batch: int, most: int, data: int) -> None:
    size, batch = sorted((size, max(batch, size, most * data)))
    full, split_batch = sizes(batch, batch, most, data), sizes(size, batch, most, data)
    assert [len(part) for part in full] == [most] * data
    assert sum(map(sum, split_batch)) == size
    flat_sizes = [part for replica in split_batch for part in replica]
    if min(map(min, full)) > 1 and size >= 2 * data:
        assert min(flat_sizes) > 1
    if batch >= 4 * most * data:
        assert max(flat_sizes) <= max(map(max, full))


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 12), st.integers(1, 4))
def test_fsdp_replicas_have_equally_many(size: int, batch: int, most: int, data: int) -> None:
    """Each gathers parameters for each micro-batch; a replica without samples takes part in one."""
    size, batch = sorted((size, max(batch, size, most * data)))
    assert len({len(part) or 1 for part in sizes(size, batch, most, data, shard=True)}) == 1
