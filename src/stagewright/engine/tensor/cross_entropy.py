"""Cross-entropy of logits with a divided vocabulary, without gathering them.

    each worker, for every token:   largest of its logits       ─► all-reduce (max)
                                    sum of exponentials         ─┐
                                    logit of the target, or 0   ─┴► all-reduce (sum) ─► log(sum) − target logit

Class indices and ``ignore_index`` are handled, with every reduction. With class probabilities, class weights or label
smoothing, which need all logits of a token, the logits are gathered. Importing this module registers the loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from stagewright.engine.tensor.axis import TensorAxis
from stagewright.engine.tensor.divided_logits import FUNCTIONS, DividedLogits

_REDUCTIONS = ("none", "mean", "sum")  # by aten's numbers


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """Compute the loss of divided logits, with the arguments of ``functional.cross_entropy``."""
    if weight is not None or label_smoothing or size_average is not None or reduce is not None:
        return None
    return _divided_loss(input, target, ignore_index, reduction)


def _cross_entropy_of_graph(
    self: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100, label_smoothing: float = 0
) -> torch.Tensor | None:
    """Compute the loss of divided logits, with the arguments of the operator in captured graphs."""
    return (
        None
        if weight is not None or label_smoothing
        else _divided_loss(self, target, ignore_index, _REDUCTIONS[reduction])
    )


FUNCTIONS[functional.cross_entropy] = _cross_entropy
FUNCTIONS[torch.ops.aten.cross_entropy_loss.default] = _cross_entropy_of_graph


def _divided_loss(logits: Any, target: Any, ignore_index: int, reduction: str) -> torch.Tensor | None:
    if not isinstance(logits, DividedLogits) or target.is_floating_point():
        return None
    class_dim = 1 if logits.dim() > 1 else 0
    shape = (*logits.shape[:class_dim], *logits.shape[class_dim + 1 :])
    if logits.division.dim != class_dim or target.shape != shape:
        return None
    division = logits.division
    rows = logits.to_local().movedim(class_dim, -1).reshape(-1, division.held)
    targets = target.reshape(-1)
    is_ignored = targets == ignore_index
    _require_in_range(targets.masked_fill(is_ignored, 0), division.size)
    losses = _TokenLosses.apply(rows, targets - division.start, division.axis)  # type: ignore[no-untyped-call]
    losses = losses.masked_fill(is_ignored, 0)
    dtype = torch.float32 if torch.is_autocast_enabled(rows.device.type) else rows.dtype
    if reduction == "none":
        return losses.to(dtype).view(target.shape)  # type: ignore[no-any-return]
    total = losses.sum()
    return (total if reduction == "sum" else total / (~is_ignored).sum()).to(dtype)  # type: ignore[no-any-return]


def _require_in_range(targets: torch.Tensor, size: int) -> None:
    """Raise where a target is no class, as cross-entropy does on one device."""
    is_outside = (targets < 0) | (targets >= size)
    if targets.device.type != "cpu":
        torch._assert_async(~is_outside.any())
    elif bool(is_outside.any()):
        raise IndexError(f"Target {int(targets[is_outside][0])} is out of bounds.")


class _TokenLosses(torch.autograd.Function):
    """Loss of each token in float32 (or float64), from this worker's columns."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, index: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
        values = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        largest = axis.reduce_values(values.amax(-1), dist.ReduceOp.MAX)
        shifted = values - largest[:, None]
        is_held = (index >= 0) & (index < logits.shape[-1])
        index = index.masked_fill(~is_held, 0)[:, None]
        picked = shifted.gather(-1, index)[:, 0].masked_fill(~is_held, 0)
        exponentials = shifted.exp_()
        sums = axis.reduce_values(torch.stack([exponentials.sum(-1), picked]))
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(exponentials.div_(sums[0, :, None]), index, is_held)
            ctx.dtype = logits.dtype
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        probabilities, index, is_held = ctx.saved_tensors
        result = probabilities * gradient[:, None]
        result.scatter_add_(-1, index, -(gradient * is_held)[:, None])
        return result.to(ctx.dtype), None, None
