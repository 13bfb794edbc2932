"""Relative errors of tensors: exact where float32 would overflow, and huge for a NaN in only one of them."""

from __future__ import annotations

import math

import pytest
import torch

from stagewright.engine.parity.relative_error import largest_difference, relative_error, scales


def exact_difference(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected.double()).abs().max())


def test_float32_differences_equal_those_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(100_000, generator=generator)
    expected = value + 1e-6 * torch.randn(100_000, generator=generator)
    assert largest_difference(value, expected) == pytest.approx(exact_difference(value, expected), rel=2e-7)
    assert relative_error(value, value.clone(), 1.0) == 0.0
    assert relative_error(value.double(), expected.double(), 2.0) == exact_difference(value, expected) / 2


def test_differences_beyond_float32_are_finite() -> None:
    value, expected = torch.tensor([3e38]), torch.tensor([-3e38])
    assert relative_error(value, expected, 3e38) == pytest.approx(2.0)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_equal_nan_and_infinity_are_no_error(number: float) -> None:
    value = torch.tensor([1.0, number])
    assert relative_error(value, value.clone(), 1.0) == 0.0
    assert relative_error(value + torch.tensor([0.5, 0.0]), value, 1.0) == 0.5
    assert relative_error(torch.tensor([1.0, 1.0]), value, 1.0) > 1e300


def test_scales_ignore_infinite_and_nearly_infinite_values() -> None:
    tensors = {"a": torch.tensor([1.0, -2.0]), "mask": torch.tensor([3.0, -torch.finfo(torch.float32).max])}
    tensors["infinite"] = torch.tensor([4.0, math.inf])
    assert scales(tensors, by_module=False) == {"a": 2.0, "mask": 3.0, "infinite": 4.0}
