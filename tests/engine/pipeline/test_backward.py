"""The backward of one stage, whole or split: a tensor without influence on the loss has no gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stagewright.engine.pipeline.backward import BackwardState, run_backward, run_input_backward, run_weight_backward


@pytest.mark.parametrize("split", [False, True])
def test_a_missing_gradient_is_not_a_zero(split: bool) -> None:
    """One output has no gradient: its branch and its input get none, also where a zero would become a NaN."""
    used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    inputs = [torch.ones(1, 2, requires_grad=True), torch.zeros(1, 2, requires_grad=True)]
    outputs: list[torch.Tensor | None] = [used(inputs[0]), unused(inputs[0]).sqrt() + inputs[1].sqrt()]
    state, gradients = BackwardState(inputs, outputs), [torch.ones(1, 2), None]
    parameters = [*used.parameters(), *unused.parameters()]
    if split:
        input_gradients = run_input_backward(state, gradients, parameters)
        assert all(parameter.grad is None for parameter in parameters)
        run_weight_backward(state, parameters)
    else:
        input_gradients = run_backward(state, gradients)
    assert input_gradients[1] is None
    torch.testing.assert_close(input_gradients[0], used.weight.sum(dim=0, keepdim=True))
    torch.testing.assert_close(used.weight.grad, torch.ones(2, 2))
    assert unused.weight.grad is None


@pytest.mark.parametrize("split", [False, True])
def test_no_output_has_a_gradient(split: bool) -> None:
    layer, value = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    state, parameters = BackwardState([value], [layer(value)]), list(layer.parameters())
    if split:
        assert run_input_backward(state, [None], parameters) == [None]
        run_weight_backward(state, parameters)
    else:
        assert run_backward(state, [None]) == [None]
    assert layer.weight.grad is None


def test_split_backward_of_an_output_of_parameters_alone() -> None:
    """Such as a relative position bias: used in this stage and sent to the next."""
    layer, table = nn.Linear(2, 2, bias=False), nn.Parameter(torch.ones(1, 2))
    value = torch.ones(1, 2, requires_grad=True)
    bias = table * 2
    state, parameters = BackwardState([value], [layer(value) * bias, bias.clone()]), [layer.weight, table]
    (input_gradients,) = run_input_backward(state, [torch.ones(1, 2), torch.full((1, 2), 10.0)], parameters)
    torch.testing.assert_close(input_gradients, 2 * layer.weight.sum(dim=0, keepdim=True))
    assert table.grad is None
    run_weight_backward(state, parameters)
    torch.testing.assert_close(table.grad, 2 * (10 + layer(value)).detach())
    torch.testing.assert_close(layer.weight.grad, torch.full((2, 2), 2.0))
