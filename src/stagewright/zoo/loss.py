"""Losses over whatever a model returns: a tensor, a tuple, a dictionary or a Hugging Face output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from stagewright.errors import UsageError
from stagewright.zoo.model import Loss, LossSource


def logits_of(output: Any) -> torch.Tensor:
    """The logits in a model's output: itself, its `logits`, or the first tensor of a tuple."""
    found: Any = output
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif hasattr(output, "logits"):
        found = output.logits
    elif isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, torch.Tensor):
        raise UsageError(
            f"the loss needs logits, but the model returned {type(output).__name__} without a tensor called "
            "'logits'; let package.module:factory return a zoo.Model with a loss of its own"
        )
    return found


def classification(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of one class for each sample."""
    return functional.cross_entropy(logits_of(output).float(), target)


def next_token(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of each next token; `target` is the input ids, -100 where none is to be learned."""
    logits = logits_of(output)[:, :-1].float()
    return functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=-100)


def own_loss(output: Any) -> torch.Tensor | None:
    """The loss that a model computes itself: a scalar called `loss` in its result, or a result that is one scalar.

    Not a scalar in a tuple: it may be a part of the loss alone, such as the balance of experts.
    """
    found: Any = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif not isinstance(output, torch.Tensor):
        found = getattr(output, "loss", None)
    scalar = isinstance(found, torch.Tensor) and found.ndim == 0 and found.is_floating_point()
    return found if scalar else None


def model_loss(output: Any, target: Any = None) -> torch.Tensor:
    """The model's own loss; refused where it has none."""
    found = own_loss(output)
    if found is None:
        what = "a tensor" if isinstance(output, torch.Tensor) else f"{type(output).__name__} without a scalar 'loss'"
        raise UsageError(
            f"no loss was given, and the model returned {what}; give loss=function, called as "
            "function(output, target), or an example with the labels of which the model makes its loss"
        )
    return found


def own_or_stand_in(output: Any, target: Any = None) -> torch.Tensor:
    """Where no loss was given: the model's own, and a stand-in where it has none."""
    found = own_loss(output)
    return stand_in(output, target) if found is None else found


def stand_in(output: Any, target: Any = None) -> torch.Tensor:
    """Stands in where no loss is known: how far every floating-point tensor is from fixed numbers, added up.

    The numbers differ from one place of a tensor's last dimension to the next and are the same for every sample, so
    that the loss is a mean over samples. A mean square alone would not do: layer norm holds it at a constant, and the
    gradients of a model that ends with one would be nothing but rounding. Nor would any distance that is a square
    everywhere: batch norm holds that, summed over samples.
    """
    tensors = [one for one in pytree.tree_leaves(output) if isinstance(one, torch.Tensor)]
    every = [_distance(one) for one in tensors if one.is_floating_point() and one.numel()]
    if not every:
        raise UsageError(
            f"the model returned {type(output).__name__} without a floating-point tensor, so there is "
            "nothing to take a loss of; let package.module:factory return a zoo.Model with a loss of its own"
        )
    return torch.stack(every).sum()


def _distance(tensor: torch.Tensor) -> torch.Tensor:
    """Mean over a tensor of d²/2 where |d| < 1, |d| - 1/2 elsewhere: far values count, but do not drown the others."""
    values = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if not values.ndim:
        values = values.reshape(1)
    # In -1 … 1, spread by the golden ratio; made of whole numbers, so that every device finds the same.
    numbers = (torch.arange(values.shape[-1], device=values.device) * 40503 % 65536).to(values.dtype) / 32768 - 1
    return functional.smooth_l1_loss(values, numbers.expand_as(values))


def loss_source(loss: Loss, output: Any) -> LossSource:
    """Whose loss it is, from what the model returns."""
    if loss is model_loss:
        return "model"
    if loss is not own_or_stand_in:
        return "given"
    return "stand-in" if own_loss(output) is None else "model"
