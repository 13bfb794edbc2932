"""The bytes that represent a missing gradient if no flags are sent."""

from __future__ import annotations

import pytest
import torch

from stagewright.engine.pipeline.transport import _fill_missing, _is_missing

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 1, 4)], ids=str)
def test_a_missing_gradient_is_recognized(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert _is_missing(_fill_missing(torch.empty(shape, dtype=dtype)))
    assert not _is_missing(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
def test_no_value_is_taken_for_a_missing_gradient(dtype: torch.dtype) -> None:
    """Values of a backward: every NaN that arithmetic produces, infinities, the largest and the smallest numbers."""
    real = torch.tensor(0.0, dtype=dtype).real.dtype
    zero = torch.zeros(4, dtype=real)
    numbers = [zero / zero, -(zero / zero), (zero - 1).sqrt(), (1 / zero) - (1 / zero), 1 / zero, -1 / zero]
    numbers += [zero + torch.finfo(real).max, zero + torch.finfo(real).min, zero - torch.finfo(real).tiny, -zero]
    for value in numbers:
        assert not _is_missing(value.to(dtype))
        assert not _is_missing(value.double().to(dtype)), "a conversion keeps it a number"


def test_a_tensor_that_only_starts_with_the_pattern_is_a_gradient() -> None:
    tensor = _fill_missing(torch.empty(64))
    tensor[-1] = 1.0
    assert not _is_missing(tensor)


def test_an_empty_tensor_is_a_gradient() -> None:
    assert not _is_missing(torch.empty(0, 3))
