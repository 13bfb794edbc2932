"""Weight gradients of large linear layers on CPUs, computed a few rows at a time.

Where a CPU has no instructions for bfloat16 or float16, oneDNN first converts the gradient of a weight to float32, so
that three times the weight is held for a moment. In pieces it converts one piece, and computes the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

PIECE_BYTES = 8 * 2**20
"""Bytes of the rows of a weight gradient that are computed at once."""


def compute_in_pieces(module: nn.Module) -> None:
    """Let the large linear layers in a module compute the gradients of their weights in pieces.

    Not for schedules that split backward: such a layer computes both of its gradients at once.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and _is_large(layer.weight):
            layer.__dict__["forward"] = _with_pieces(layer.forward)


def _is_large(weight: torch.Tensor) -> bool:
    has_two_bytes = weight.dtype in (torch.bfloat16, torch.float16)
    return weight.device.type == "cpu" and has_two_bytes and weight.nbytes >= 2 * PIECE_BYTES


def _splits(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> bool:
    return weight.requires_grad and _is_large(weight) and x.dtype is weight.dtype


def _with_pieces(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with _LinearMode():
            return forward(*args, **kwargs)

    return run


class _LinearMode(TorchFunctionMode):
    """Replaces ``functional.linear``."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is functional.linear and not kwargs and _splits(*args):
            return _Linear.apply(*args, *(None,) * (3 - len(args)))  # type: ignore[no-untyped-call]
        return function(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    """A linear layer whose weight gradient is computed in pieces."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient @ weight if needs_input else None,
            _weight_gradient(rows, x.reshape(-1, x.shape[-1]), weight) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def _weight_gradient(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    total = torch.empty_like(weight)
    rows = max(1, PIECE_BYTES * weight.shape[0] // weight.nbytes)
    for start in range(0, weight.shape[0], rows):
        torch.mm(gradient[:, start : start + rows].t(), x, out=total[start : start + rows])
    return total
