"""Where the samples of a batch are: dimensions of tensors, and lists."""

from __future__ import annotations

import pytest
import torch

from stagewright.errors import UsageError
from stagewright.sample_lists import BatchDims, find_sample_lists, flatten_samples


def example(batch: int) -> object:
    """Samples in the first and in the second dimension, and in a list."""
    return {
        "x": torch.zeros(batch, 4),
        "time_first": torch.zeros(4, batch),
        "table": torch.zeros(4, 4),
        "flag": 3,
        "images": [torch.zeros(3, index) for index in range(batch)],
        "levels": [torch.zeros(batch, 4), torch.zeros(batch, 2)],
    }


def test_lists_of_different_lengths_are_lists_of_samples() -> None:
    assert find_sample_lists(example(4), example(5)) == {("images",)}
    assert find_sample_lists(([1],), ([1, 2],)) == {(0,)}
    assert find_sample_lists([1], [1, 2]) == {()}
    assert find_sample_lists([1], (1, 2)) == frozenset()


def test_such_a_list_is_one_leaf() -> None:
    leaves, spec = flatten_samples(example(2), {("images",)})
    assert [type(leaf) for leaf in leaves] == [*[torch.Tensor] * 3, int, list, *[torch.Tensor] * 2]
    rebuilt = spec.unflatten(leaves)
    assert rebuilt["images"] is leaves[4]
    assert rebuilt["levels"][1].shape == (2, 2)
    leaves, spec = flatten_samples([torch.zeros(1), torch.ones(1)], {()})
    assert len(leaves) == 1
    assert spec.unflatten(leaves)[1] == 1


def test_batch_dims_from_two_examples() -> None:
    dims = BatchDims.find(example(4), example(5))
    assert dims.dims == (0, 1, None, None, 0, 0, 0)
    assert dims.lists == {("images",)}
    assert [dims.count(example(size)) for size in (1, 6)] == [1, 6]
    assert BatchDims.find((1,), (1,)).count((1,)) is None
    with pytest.raises(UsageError, match="differ in structure"):
        BatchDims.find((torch.zeros(2),), [torch.zeros(3)])
    with pytest.raises(UsageError, match="has 2 values, the example had 7"):
        dims.flatten((1, 2))
