"""Weight gradients of large linear layers on CPUs, computed in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stagewright.engine.weight_gradients import in_pieces
from stagewright.engine.weight_gradients.in_pieces import compute_in_pieces


def backward(module: nn.Linear, x: torch.Tensor) -> list[Any]:
    """Return the output and all gradients."""
    x = x.clone().requires_grad_()
    output = module(x)
    output.square().mean().backward()
    parameters = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    return [output, x.grad, *parameters]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(6, 24), (2, 3, 24)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pieces_compute_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...], bias: bool
) -> None:
    monkeypatch.setattr(in_pieces, "PIECE_BYTES", 24 * 2 * 7)  # 7 rows of 50
    pieces: list[Any] = []
    compute = in_pieces._weight_gradient

    def counted(*args: Any) -> torch.Tensor:
        pieces.append(args)
        return compute(*args)

    monkeypatch.setattr(in_pieces, "_weight_gradient", counted)
    torch.manual_seed(0)
    module, x = nn.Linear(24, 50, bias=bias, dtype=dtype), torch.randn(shape).to(dtype)
    expected = backward(module, x)
    compute_in_pieces(nn.Sequential(module))
    assert not pieces
    for value, wanted in zip(backward(module, x), expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-2, atol=1e-4)
    assert len(pieces) == 1
    with torch.no_grad():
        assert torch.equal(module(x), expected[0])
    module.weight.requires_grad_(False)
    backward(module, x)
    assert len(pieces) == 1  # a frozen weight has no gradient


def test_small_layers_and_other_dtypes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    small = nn.Linear(24, 50, dtype=torch.bfloat16)
    monkeypatch.setattr(in_pieces, "PIECE_BYTES", 24 * 2 * 26)
    single = nn.Linear(24, 50)
    compute_in_pieces(nn.Sequential(small, single))
    assert "forward" not in vars(small)
    assert "forward" not in vars(single)
