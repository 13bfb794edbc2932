"""Keep outputs and losses differentiable, so that backward always triggers the collectives other replicas wait for.

Some samples may use no parameter at all, or have a constant loss. Their replica must still take part in all-reduces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stagewright import structure


def any_requires_grad(values: Any) -> bool:
    """Return whether any of these tensors requires a gradient."""
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in structure.leaves(values))


def keep_outputs_differentiable(outputs: Any, anchor: torch.Tensor) -> Any:
    """Make each differentiable output depend on ``anchor``, so that backward reaches it.

    If no output requires a gradient, because these samples used no parameter, all floating-point outputs are anchored.
    """
    anchor_all = not any_requires_grad(outputs)

    def anchored(output: torch.Tensor) -> Any:
        needed = output.requires_grad or (anchor_all and output.is_floating_point())
        return _Anchored.apply(output, anchor) if needed else output  # type: ignore[no-untyped-call]

    return structure.map_tensors(anchored, outputs) if anchor.requires_grad else outputs


def keep_loss_differentiable(loss: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
    """Wrap a loss so that backward always reaches the outputs, even if the loss is constant for some samples."""

    def differentiable_loss(outputs: Any, target: Any) -> torch.Tensor:
        value = loss(outputs, target)
        if value.requires_grad or not torch.is_grad_enabled():
            return value
        leaves = [leaf for leaf in structure.leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        return _ConstantLoss.apply(value, *leaves) if leaves else value  # type: ignore[no-untyped-call]

    return differentiable_loss


class _Anchored(torch.autograd.Function):
    """Identity that also depends on an anchor, which gets no gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return value.detach()  # returning the value itself would forbid in-place changes

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _ConstantLoss(torch.autograd.Function):
    """A constant loss with zero gradients for the outputs."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.zeros = [output.new_zeros(()).expand(output.shape) for output in outputs]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        return None, *ctx.zeros
