"""Losses of a model's output: a tensor, a tuple, a dictionary or a Hugging Face output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from stagewright import structure
from stagewright.errors import UsageError
from stagewright.zoo.model import Loss, LossSource


def logits_of(output: Any) -> torch.Tensor:
    """Return the logits of a model's output: the output itself, its `logits`, or the first element of a tuple."""
    logits: Any = output
    if isinstance(output, Mapping):
        logits = output.get("logits")
    elif hasattr(output, "logits"):
        logits = output.logits
    elif isinstance(output, tuple | list) and output:
        logits = output[0]
    if not isinstance(logits, torch.Tensor):
        raise UsageError(
            f"the loss needs logits, but the model returned {type(output).__name__} without a tensor 'logits'; let "
            "package.module:factory return a zoo.Model with a custom loss"
        )
    return logits


def classification(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy with one class per sample."""
    return functional.cross_entropy(logits_of(output).float(), target)


def next_token(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token; `target` is the input ids, with -100 for ignored positions."""
    logits = logits_of(output)[:, :-1].float()
    return functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=-100)


def find_model_loss(output: Any) -> torch.Tensor | None:
    """Return the loss that a model computes itself.

    That is a scalar `loss` in its output, an output that is a scalar, or the sum of a dictionary of scalars, as of
    torchvision's detectors. A scalar in a tuple does not count, because it may be only a part of the loss, such as an
    expert-balance term.
    """
    loss: Any = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
        if "loss" not in output and output and all(map(_is_scalar, output.values())):
            loss = torch.stack(list(output.values())).sum()
    elif not isinstance(output, torch.Tensor):
        loss = getattr(output, "loss", None)
    return loss if _is_scalar(loss) else None


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()


def model_loss(output: Any, target: Any = None) -> torch.Tensor:
    """Return the loss that the model computes itself; raise UsageError if it computes none."""
    loss = find_model_loss(output)
    if loss is None:
        kind = "a tensor" if isinstance(output, torch.Tensor) else f"{type(output).__name__} without a scalar 'loss'"
        raise UsageError(
            f"no loss was given, and the model returned {kind}; give loss=function, called as "
            "function(output, target), or an example with the labels from which the model computes its loss"
        )
    return loss


def default_loss(output: Any, target: Any = None) -> torch.Tensor:
    """Return the loss that the model computes itself, or else the surrogate loss."""
    loss = find_model_loss(output)
    return surrogate_loss(output, target) if loss is None else loss


def surrogate_loss(output: Any, target: Any = None) -> torch.Tensor:
    """Compute a loss if none is known: the distance of every floating-point output from fixed numbers.

    The numbers vary along a tensor's last dimension and are the same for every sample, so that the loss is a mean over
    samples. A mean square would not work: layer norm keeps it constant, and the gradients of a model that ends with one
    would be rounding errors. Neither would a quadratic distance: batch norm keeps its sum over samples constant.
    """
    tensors = structure.tensors(output)
    values = [tensor for tensor in tensors if tensor.is_floating_point()]
    distances = [_distance(tensor) for tensor in values if tensor.numel()]
    if values and not distances:  # a detector that finds nothing
        return torch.stack([tensor.sum() for tensor in values]).sum()
    if not distances:
        raise UsageError(
            f"the model returned {type(output).__name__} without a floating-point tensor, so it has no loss; let "
            "package.module:factory return a zoo.Model with a custom loss"
        )
    return torch.stack(distances).sum()


def _distance(tensor: torch.Tensor) -> torch.Tensor:
    """Return the mean of d²/2 where |d| < 1, else |d| - 1/2, so that large values do not dominate."""
    values = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if not values.ndim:
        values = values.reshape(1)
    # In -1 … 1, spread by the golden ratio; computed from integers, so that every device has the same values.
    numbers = (torch.arange(values.shape[-1], device=values.device) * 40503 % 65536).to(values.dtype) / 32768 - 1
    return functional.smooth_l1_loss(values, numbers.expand_as(values))


def loss_source(loss: Loss, output: Any) -> LossSource:
    """Return the origin of the loss, given an output of the model."""
    if loss is model_loss:
        return "model"
    if loss is not default_loss:
        return "given"
    return "stand-in" if find_model_loss(output) is None else "model"
