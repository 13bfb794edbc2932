"""Masks of dropout are drawn with the random numbers of torch's dropout."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from stagewright.engine.tensor.dropout import draw_noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.1, 1 / 3, 0.5, 0.97, 1.0])
def test_a_part_of_a_mask_is_that_of_the_whole(dtype: torch.dtype, p: float) -> None:
    like = torch.ones(4, 3, 33, dtype=dtype)
    torch.manual_seed(3)
    whole = functional.dropout(torch.ones(4, 6, 33, dtype=dtype), p)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    part = draw_noise((4, 6, 33), p, like, lambda noise: noise.narrow(1, 3, 3))
    assert part.dtype == dtype
    assert torch.equal(part, whole[:, 3:])
    assert torch.equal(torch.get_rng_state(), after), "what is drawn next is the same too"
