"""Positions and masks that a block makes from the numbers of tokens that it sees, for the whole sequence."""

from __future__ import annotations

import pytest
import torch

from stagewright.engine.context.sources import whole_sizes
from stagewright.errors import UsageError

HERE, WHOLE = (6, 7), (11, 14)
"""Queries and keys of a worker, and of the sequences."""


def test_positions_and_masks_are_whole() -> None:
    for func, args, expected in (
        (torch.arange, (6,), (11,)),
        (torch.arange, (0, 7), (0, 14)),
        (torch.arange, (2, 7), (2, 7)),
        (torch.arange, (5,), (5,)),
        (torch.zeros, ((1, 4, 6, 7),), ((1, 4, 11, 14),)),
        (torch.ones, (6, 7), (11, 14)),
        (torch.full, ((6, 7), 0.5), ((11, 14), 0.5)),
        (torch.zeros, (6, 16), (6, 16)),
    ):
        found, _ = whole_sizes(func, args, {}, HERE, WHOLE)
        assert tuple(found) == expected
    _, options = whole_sizes(torch.zeros, (), {"size": (6, 7)}, HERE, WHOLE)
    assert options == {"size": (11, 14)}


def test_only_whole_tensors_are_reshaped_whole() -> None:
    mask, part = torch.ones(11, 14), torch.ones(6, 7)
    assert tuple(whole_sizes(torch.Tensor.view, (mask, 1, 1, 6, 7), {}, HERE, WHOLE)[0][1:]) == (1, 1, 11, 14)
    assert tuple(whole_sizes(torch.Tensor.view, (part, 1, 1, 6, 7), {}, HERE, WHOLE)[0][1:]) == (1, 1, 6, 7)


def test_positions_of_equal_shares_are_ambiguous() -> None:
    """A worker has 8 of 16 queries, and 8 of 17 keys."""
    with pytest.raises(UsageError, match="positions of 16 queries from those of 17 keys"):
        whole_sizes(torch.arange, (8,), {}, (8, 8), (16, 17))
    mask, _ = whole_sizes(torch.zeros, (8, 8), {}, (8, 8), (16, 17))
    assert tuple(mask) == (16, 17)
