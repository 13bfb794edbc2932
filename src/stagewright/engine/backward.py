"""The backward pass of one stage and one micro-batch: whole, or first for the inputs and later for the weights.

The two halves come from ``torch.distributed.pipelining._backward`` (private, reached from this file only). A stage
whose inputs need no gradient has nothing to do in the first half: its whole backward happens in the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["Held", "backward_inputs", "backward_weights", "backward_whole"]


@dataclass(slots=True)
class Held:
    """What a stage holds of a micro-batch between its forward and its backward."""

    inputs: list[torch.Tensor]
    """The received values whose gradient must travel back."""
    outputs: list[torch.Tensor | None]
    """The values (or the loss) whose gradient arrives; ``None`` where a value turned out not to need one."""
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    """Gradients of the outputs, once the first half has run."""
    groups: Any = None
    """What the first half left for the second."""
    forgotten: bool = False
    """Whether the stage runs again for its backward."""


def backward_whole(held: Held, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Add the parameters' gradients; return those of the inputs (zeros where none arrived)."""
    outputs, given = _paired(held.outputs, gradients)
    if outputs:
        torch.autograd.backward(outputs, given)
    return _taken(held.inputs)


def backward_inputs(
    held: Held, gradients: Sequence[torch.Tensor | None], parameters: Sequence[nn.Parameter]
) -> list[torch.Tensor]:
    """The first half: gradients of the inputs alone."""
    outputs, given = _paired(held.outputs, gradients)
    held.outputs, held.gradients = list(outputs), given
    if not held.inputs or not outputs:
        return [torch.zeros_like(value) for value in held.inputs]
    from torch.distributed.pipelining._backward import stage_backward_input

    arrived = [gradient for gradient in given if gradient is not None]
    found, held.groups = stage_backward_input(outputs, arrived or None, held.inputs, iter(parameters))
    return [
        torch.zeros_like(value) if gradient is None else gradient
        for value, gradient in zip(held.inputs, found, strict=True)
    ]


def backward_weights(held: Held, parameters: Sequence[nn.Parameter]) -> None:
    """The second half: the parameters' gradients."""
    if held.groups is None:
        outputs, given = _paired(held.outputs, held.gradients)
        if outputs:
            torch.autograd.backward(outputs, given)
        return
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(parameters), held.groups)


def _paired(
    outputs: Sequence[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The outputs that take part, each with its gradient."""
    pairs = [(value, gradient) for value, gradient in zip(outputs, gradients, strict=True) if value is not None]
    return [value for value, _ in pairs], [gradient for _, gradient in pairs]


def _taken(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that reached the inputs."""
    found = []
    for value in inputs:
        found.append(torch.zeros_like(value) if value.grad is None else value.grad)
        value.grad = None
    return found
