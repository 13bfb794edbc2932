"""A smaller batch is split into fewer micro-batches of about the usual size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from stagewright.engine.batch.microbatch import microbatch_layout
from stagewright.engine.batch.splitter import BatchSplitter, ReplicaShare, count_microbatches, share_bounds
from stagewright.graph.capture import capture
from stagewright.spec.plan import Mesh, ModelSpec, Plan
from stagewright.spec.unequal_devices import split_sizes
from stagewright.zoo.loss import default_loss
from stagewright.zoo.model import Batch, Model


def sizes(size: int, batch: int, most: int, data: int = 1, shard: bool = False) -> list[list[int]]:
    """Samples of each replica's micro-batches of a batch of ``size`` under a plan for ``batch``."""
    plan = Plan(model=ModelSpec(name="m"), batch=batch, microbatches=most, mesh=Mesh(data=data), shard=shard)
    num = count_microbatches(size, plan)
    return [
        [part.num_samples for part in microbatch_layout(num, split_sizes(size, data), replica_index)]
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


def test_a_share_is_split_like_the_whole_batch() -> None:
    """A replica that reads only its own samples gets the micro-batches that it would take from the whole batch."""

    def example(size: int) -> Batch:
        return Batch(args=(torch.ones(size, 3),), target=torch.zeros(size))

    module = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    model = Model(
        name="m", module=module, args=(torch.ones(4, 3),), loss=default_loss, batch_size=4, make_example=example
    )
    plan = Plan(model=ModelSpec(name="m"), batch=11, microbatches=2, mesh=Mesh(data=2))
    splitter = BatchSplitter(plan, model, capture(module, model.args))
    inputs, target, device = torch.randn(11, 3), torch.randn(11), torch.device("cpu")
    for replica in range(2):
        first, end = share_bounds(11, plan, replica)
        whole = splitter.split(Batch(args=(inputs,), target=target), device, replica)
        part = Batch(args=(inputs[first:end],), target=target[first:end])
        share = splitter.split(ReplicaShare(batch=part, replica=replica, num_samples=11), device, replica)
        assert [(own.first_sample, own.num_samples, own.weight) for own in share] == [
            (own.first_sample, own.num_samples, own.weight) for own in whole
        ]
        for own, expected in zip(share, whole, strict=True):
            assert torch.equal(own.args[0], expected.args[0])
            assert torch.equal(own.target, expected.target)
