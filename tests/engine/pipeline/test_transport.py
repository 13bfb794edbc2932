"""What stands for a gradient that no one made, where no marks travel."""

from __future__ import annotations

import pytest
import torch

from stagewright.engine.pipeline.transport import _fill_missing, _is_missing

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 1, 4)], ids=str)
def test_it_is_known_again(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert _is_missing(_fill_missing(torch.empty(shape, dtype=dtype)))
    assert not _is_missing(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
def test_no_number_looks_like_it(dtype: torch.dtype) -> None:
    """Whatever a backward may make: all kinds of NaN that arithmetic gives, infinities, the largest and the least."""
    real = torch.tensor(0.0, dtype=dtype).real.dtype
    zero = torch.zeros(4, dtype=real)
    numbers = [zero / zero, -(zero / zero), (zero - 1).sqrt(), (1 / zero) - (1 / zero), 1 / zero, -1 / zero]
    numbers += [zero + torch.finfo(real).max, zero + torch.finfo(real).min, zero - torch.finfo(real).tiny, -zero]
    for one in numbers:
        assert not _is_missing(one.to(dtype))
        assert not _is_missing(one.double().to(dtype)), "a conversion keeps it a number"


def test_a_tensor_that_only_begins_like_it_is_a_gradient() -> None:
    tensor = _fill_missing(torch.empty(64))
    tensor[-1] = 1.0
    assert not _is_missing(tensor)


def test_an_empty_tensor_is_a_gradient() -> None:
    assert not _is_missing(torch.empty(0, 3))
