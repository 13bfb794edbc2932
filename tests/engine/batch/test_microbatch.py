"""Batch splitting: sizes as in torch, every sample once, weighted means add up to the mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from stagewright.engine.batch.microbatch import make_slicer, microbatch_layout, microbatch_sizes
from stagewright.errors import UsageError
from stagewright.graph import capture
from stagewright.sample_lists import BatchDims
from stagewright.spec.unequal_devices import split_sizes

counts = st.integers(1, 12)
sizes_of_batches = st.integers(1, 200)


@given(sizes_of_batches, counts)
def test_sizes_are_those_of_tensor_split(samples: int, num: int) -> None:
    expected = tuple(len(part) for part in torch.arange(samples).tensor_split(num))
    assert split_sizes(samples, num) == expected
    assert microbatch_sizes(samples, num) == tuple(size for size in expected if size)


@given(sizes_of_batches, counts, counts)
def test_every_sample_is_in_one_microbatch_of_one_replica(batch: int, num: int, data: int) -> None:
    all_microbatches = [
        piece for replica in range(data) for piece in microbatch_layout(num, split_sizes(batch, data), replica)
    ]
    samples = [piece.first_sample + offset for piece in all_microbatches for offset in range(piece.num_samples)]
    assert samples == list(range(batch))
    assert sum(piece.weight for piece in all_microbatches) == pytest.approx(1, abs=1e-12)
    assert all(piece.num_samples > 0 for piece in all_microbatches)


@settings(deadline=None)
@given(sizes_of_batches, counts, counts)
def test_weighted_means_add_up_to_the_mean(batch: int, num: int, data: int) -> None:
    losses = torch.linspace(-3, 5, batch, dtype=torch.float64).square()
    total = 0.0
    for replica in range(data):
        for piece in microbatch_layout(num, split_sizes(batch, data), replica):
            total += piece.weight * float(losses.narrow(0, piece.first_sample, piece.num_samples).mean())
    assert total == pytest.approx(float(losses.mean()), rel=1e-12)


def test_numbers() -> None:
    assert split_sizes(10, 4) == (3, 3, 2, 2)
    assert split_sizes(2, 3) == (1, 1, 0)
    assert microbatch_sizes(5, 8) == (1, 1, 1, 1, 1)
    assert microbatch_sizes(0, 4) == ()
    first, second = microbatch_layout(2, split_sizes(10, 2), 1)
    assert (first.replica, first.first_sample, first.num_samples, first.weight) == (1, 5, 3, 0.3)
    assert (second.replica, second.first_sample, second.num_samples, second.weight) == (1, 8, 2, 0.2)
    assert microbatch_layout(4, split_sizes(2, 3), 2) == ()


@pytest.mark.parametrize(("batch", "num"), [(0, 2), (4, 0)])
def test_invalid_sizes_are_rejected(batch: int, num: int) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        split_sizes(batch, num)
    with pytest.raises(UsageError, match="at least 1"):
        microbatch_sizes(4, 0)


def test_batch_dims_of_a_graph() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, scale: torch.Tensor, *, bias: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x) * scale) + bias

    graph = capture(Two(), (torch.zeros(3, 4), torch.zeros(4)), {"bias": torch.zeros(3, 1)})
    assert graph.input_batch_dims() == (0, None, 0)


def test_slices_are_views_along_the_batch_dimension() -> None:
    batch = ({"x": torch.arange(10).view(5, 2), "mask": torch.arange(20).view(2, 10)}, "whole", torch.ones(5))
    slice_samples = make_slicer(batch, BatchDims(dims=(0, 1, None, None)), batch=5)
    first, second = slice_samples(0, 3), slice_samples(3, 2)
    assert first[0]["x"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert second[0]["x"].tolist() == [[6, 7], [8, 9]]
    assert second[0]["mask"].tolist() == [[6, 7, 8, 9], [16, 17, 18, 19]]  # two rows per sample
    assert second[1] == "whole"
    assert second[2] is batch[2]
    assert second[0]["x"].untyped_storage().data_ptr() == batch[0]["x"].untyped_storage().data_ptr()
    assert slice_samples(4, 1)[0]["x"].tolist() == [[8, 9]]


def test_lists_of_samples_are_sliced_by_items() -> None:
    dims = BatchDims(dims=(0, 0), lists=frozenset({(0,)}))
    images = [torch.full((1, index), 1.0) for index in range(5)]
    first, second = (make_slicer((images, torch.arange(5)), dims, batch=5)(*bounds) for bounds in ((0, 3), (3, 2)))
    assert [image.shape[1] for image in first[0]] == [0, 1, 2]
    assert [image.shape[1] for image in second[0]] == [3, 4]
    assert second[1].tolist() == [3, 4]
    with pytest.raises(UsageError, match="value 0 of the batch is a list of 4 items; it should hold 5 samples"):
        make_slicer((images[1:], torch.arange(5)), dims, batch=5)(0, 3)


def test_invalid_batches_are_rejected() -> None:
    with pytest.raises(UsageError, match=r"value 1 .* shape \[4\].* should hold 5 samples"):
        make_slicer((torch.zeros(5), torch.zeros(4)), BatchDims(dims=(0, 0)), batch=5)(0, 3)
    with pytest.raises(UsageError, match="has 2 values, the example had 1"):
        make_slicer((torch.zeros(5), torch.zeros(4)), BatchDims(dims=(0,)), batch=5)
    with pytest.raises(UsageError, match="can't take 3 of 5 samples"):
        make_slicer((torch.zeros(5),), BatchDims(dims=(None,)), batch=5)(0, 3)
    assert make_slicer(None, BatchDims(dims=(None,)), batch=5)(0, 3) is None
    assert make_slicer((3, torch.zeros(5)), BatchDims(dims=(None, None)), batch=5)(0, 5)[0] == 3
