"""A smaller batch is cut into fewer micro-batches, of about the size of a full batch's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.engine.batch.microbatch import microbatch_layout
from stagewright.engine.batch.splitter import count_microbatches
from stagewright.spec.plan import Mesh, ModelSpec, Plan


def sizes(size: int, batch: int, most: int, data: int = 1, shard: bool = False) -> list[list[int]]:
    """Samples of each replica's micro-batches of a batch of ``size`` under a plan for ``batch``."""
    plan = Plan(model=ModelSpec(name="m"), batch=batch, microbatches=most, mesh=Mesh(data=data), shard=shard)
    num = count_microbatches(size, plan)
    return [[one.num_samples for one in microbatch_layout(size, num, data=data, replica=at)] for at in range(data)]


@pytest.mark.parametrize(
    ("size", "batch", "most", "expected"),
    [(9, 68, 8, [5, 4]), (68, 68, 8, [9] * 4 + [8] * 4), (3, 16, 8, [3]), (5, 16, 8, [3, 2]), (3, 8, 8, [1, 1, 1])],
)
def test_numbers(size: int, batch: int, most: int, expected: list[int]) -> None:
    assert sizes(size, batch, most) == [expected]


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 12), st.integers(1, 4))
def test_like_those_of_a_full_batch(size: int, batch: int, most: int, data: int) -> None:
    size, batch = sorted((size, max(batch, size, most * data)))
    full, found = sizes(batch, batch, most, data), sizes(size, batch, most, data)
    assert [len(one) for one in full] == [most] * data
    assert sum(map(sum, found)) == size
    every = [one for replica in found for one in replica]
    if min(map(min, full)) > 1 and size >= 2 * data:
        assert min(every) > 1
    if batch >= 4 * most * data:
        assert max(every) <= max(map(max, full))


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 12), st.integers(1, 4))
def test_replicas_that_share_parameters_have_equally_many(size: int, batch: int, most: int, data: int) -> None:
    """Each gathers them from all, for each of its micro-batches; one without a sample takes part in one."""
    size, batch = sorted((size, max(batch, size, most * data)))
    assert len({len(one) or 1 for one in sizes(size, batch, most, data, shard=True)}) == 1
