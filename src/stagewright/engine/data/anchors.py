"""Backward passes that reach what other replicas wait for, whatever these samples used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["hung", "reaching", "trains"]


def trains(values: Any) -> bool:
    """Whether any of these tensors wants a gradient."""
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in tree_leaves(values))


def hung(outputs: Any, anchor: torch.Tensor) -> Any:
    """Outputs through each of which backward reaches an anchor.

    If none of them wants a gradient, since these samples used no parameter, all do: other replicas wait for this one's.
    """
    every = not trains(outputs)

    def held(one: torch.Tensor) -> Any:
        wanted = one.requires_grad or (every and one.is_floating_point())
        return _Held.apply(one, anchor) if wanted else one  # type: ignore[no-untyped-call]

    return tree_map_only(torch.Tensor, held, outputs) if anchor.requires_grad else outputs


def reaching(loss: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
    """A loss from which backward always reaches the outputs: other replicas wait for this one's sums.

    One may be constant for some samples, where nothing is to be learned from them.
    """

    def reached(outputs: Any, target: Any) -> torch.Tensor:
        value = loss(outputs, target)
        if value.requires_grad or not torch.is_grad_enabled():
            return value
        wanted = [one for one in tree_leaves(outputs) if isinstance(one, torch.Tensor) and one.requires_grad]
        return _Constant.apply(value, *wanted) if wanted else value  # type: ignore[no-untyped-call]

    return reached


class _Held(torch.autograd.Function):
    """A value as it is, hung on an anchor."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return value.detach()  # not the value itself, which could then not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Constant(torch.autograd.Function):
    """A number as it is; backward gives zeros to values that it does not depend on."""

    @staticmethod
    def forward(ctx: Any, number: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        ctx.zeros = [one.new_zeros(()).expand(one.shape) for one in values]
        return number.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        return None, *ctx.zeros
