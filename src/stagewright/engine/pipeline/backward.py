"""The backward pass of one stage and one micro-batch: whole, or split into input gradient (B) and weight gradient (W).

The split uses ``torch.distributed.pipelining._backward`` (private, imported in this file only), which handles outputs
that depend on the stage's inputs. Other outputs run their whole backward in the second half: those computed from
parameters alone, and all outputs if no input needs a gradient.

``None`` is the gradient of a tensor that the loss does not depend on, as in autograd. It is not a zero: an optimizer
skips a parameter without a gradient, and changes one whose gradient is zero (weight decay, momentum).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from stagewright.engine.pipeline.cuda_graphs import ReplayedForward


@dataclass(slots=True)
class BackwardState:
    """The inputs and outputs of a stage that its backward of one micro-batch needs."""

    inputs: list[torch.Tensor]
    """The received tensors whose gradient is sent back."""
    outputs: list[torch.Tensor | None]
    """The outputs (or the loss) that get a gradient; ``None`` for one that does not require it."""
    deferred_outputs: list[torch.Tensor] = field(default_factory=list)
    """The outputs whose backward runs in the second half."""
    deferred_gradients: list[torch.Tensor] = field(default_factory=list)
    param_groups: Any = None
    """Intermediate results of the first half for the second."""
    is_recomputed: bool = False
    replayed: ReplayedForward | None = None
    """The stage's forward of this micro-batch, if it was a CUDA graph."""


def run_backward(state: BackwardState, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Accumulate the parameters' gradients; return the gradients of the inputs."""
    outputs, output_gradients = _pair(state.outputs, gradients)
    if outputs:
        torch.autograd.backward(outputs, output_gradients)
    if state.replayed is not None:
        return state.replayed.backward()
    input_gradients = [tensor.grad for tensor in state.inputs]
    for tensor in state.inputs:
        tensor.grad = None
    return input_gradients


def run_input_backward(
    state: BackwardState, gradients: Sequence[torch.Tensor | None], parameters: Sequence[nn.Parameter]
) -> list[torch.Tensor | None]:
    """Run the first half of backward: return the gradients of the inputs alone."""
    outputs, output_gradients = _pair(state.outputs, gradients)
    depends = [_depends_on(output, state.inputs) for output in outputs]
    state.outputs = []
    state.deferred_outputs = _select(outputs, depends, False)
    state.deferred_gradients = _select(output_gradients, depends, False)
    if not any(depends):
        return [None] * len(state.inputs)
    from torch.distributed.pipelining._backward import stage_backward_input

    input_gradients, state.param_groups = stage_backward_input(
        _select(outputs, depends, True), _select(output_gradients, depends, True), state.inputs, iter(parameters)
    )
    return list(input_gradients)


def run_weight_backward(state: BackwardState, parameters: Sequence[nn.Parameter]) -> None:
    """Run the second half of backward: accumulate the parameters' gradients."""
    if state.deferred_outputs:
        torch.autograd.backward(
            state.deferred_outputs, state.deferred_gradients, retain_graph=state.param_groups is not None
        )
        if state.replayed is not None:
            state.replayed.backward()
    if state.param_groups is None:
        return
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(parameters), state.param_groups)


def _depends_on(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether a gradient of the output reaches one of the inputs."""
    ends = {get_gradient_edge(tensor).node for tensor in inputs}
    pending = [get_gradient_edge(output).node] if ends else []
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node in ends:
            return True
        following = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= following
        pending += following
    return False


def _select(tensors: Sequence[torch.Tensor], flags: Sequence[bool], wanted: bool) -> list[torch.Tensor]:
    return [tensor for tensor, flag in zip(tensors, flags, strict=True) if flag is wanted]


def _pair(
    outputs: Sequence[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the outputs that have a gradient, and these gradients."""
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output is not None and gradient is not None
    ]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]
