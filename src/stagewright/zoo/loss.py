"""Losses over whatever a model returns: a tensor, a tuple, a dictionary or a Hugging Face output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from stagewright.errors import UsageError


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


def mean_square(output: Any, target: Any = None) -> torch.Tensor:
    """Stands in where no loss is known: the mean square of every floating-point tensor, added up."""
    tensors = [one for one in pytree.tree_leaves(output) if isinstance(one, torch.Tensor) and one.is_floating_point()]
    if not tensors:
        raise UsageError(
            f"the model returned {type(output).__name__} without a floating-point tensor, so there is "
            "nothing to take a loss of; let package.module:factory return a zoo.Model with a loss of its own"
        )
    return torch.stack([one.float().square().mean() for one in tensors]).sum()
