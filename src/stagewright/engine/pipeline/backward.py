"""The backward pass of one stage and one micro-batch: whole, or first for the inputs and later for the weights.

The two halves come from ``torch.distributed.pipelining._backward`` (private, reached from this file only). They know of
outputs that depend on the inputs. The whole backward of others happens in the second half: of a value made of
parameters alone, and of all where no input needs a gradient.

``None`` is the gradient of what no loss reaches, as in autograd. It is not a zero: an optimiser leaves a parameter
without a gradient alone, and changes one whose gradient is zero (weight decay, momentum).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

__all__ = ["Held", "backward_inputs", "backward_weights", "backward_whole"]


@dataclass(slots=True)
class Held:
    """What a stage holds of a micro-batch between its forward and its backward."""

    inputs: list[torch.Tensor]
    """The received values whose gradient must travel back."""
    outputs: list[torch.Tensor | None]
    """The values (or the loss) whose gradient arrives; ``None`` where a value turned out not to need one."""
    later: list[torch.Tensor] = field(default_factory=list)
    """The outputs that the first half left alone."""
    gradients: list[torch.Tensor] = field(default_factory=list)
    """Their gradients."""
    groups: Any = None
    """What the first half left for the second."""
    forgotten: bool = False
    """Whether the stage runs again for its backward."""


def backward_whole(held: Held, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Add the parameters' gradients; return those of the inputs."""
    outputs, given = _paired(held.outputs, gradients)
    if outputs:
        torch.autograd.backward(outputs, given)
    return _taken(held.inputs)


def backward_inputs(
    held: Held, gradients: Sequence[torch.Tensor | None], parameters: Sequence[nn.Parameter]
) -> list[torch.Tensor | None]:
    """The first half: gradients of the inputs alone."""
    outputs, given = _paired(held.outputs, gradients)
    depend = [_depends(output, held.inputs) for output in outputs]
    held.outputs, held.later, held.gradients = [], _chosen(outputs, depend, False), _chosen(given, depend, False)
    if not any(depend):
        return [None] * len(held.inputs)
    from torch.distributed.pipelining._backward import stage_backward_input

    found, held.groups = stage_backward_input(
        _chosen(outputs, depend, True), _chosen(given, depend, True), held.inputs, iter(parameters)
    )
    return list(found)


def backward_weights(held: Held, parameters: Sequence[nn.Parameter]) -> None:
    """The second half: the parameters' gradients."""
    if held.later:
        torch.autograd.backward(held.later, held.gradients, retain_graph=held.groups is not None)
    if held.groups is None:
        return
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(parameters), held.groups)


def _depends(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a gradient of the output reaches one of the inputs."""
    ends = {get_gradient_edge(value).node for value in inputs}
    todo = [get_gradient_edge(output).node] if ends else []
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node in ends:
            return True
        following = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= following
        todo += following
    return False


def _chosen(values: Sequence[torch.Tensor], marks: Sequence[bool], wanted: bool) -> list[torch.Tensor]:
    return [value for value, mark in zip(values, marks, strict=True) if mark is wanted]


def _paired(
    outputs: Sequence[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs that take part, each with its gradient."""
    pairs = [
        (value, gradient)
        for value, gradient in zip(outputs, gradients, strict=True)
        if value is not None and gradient is not None
    ]
    return [value for value, _ in pairs], [gradient for _, gradient in pairs]


def _taken(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients that reached the inputs."""
    found = []
    for value in inputs:
        found.append(value.grad)
        value.grad = None
    return found
