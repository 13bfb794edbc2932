"""The backward of one stage: what no loss reaches has no gradient, whole or in two halves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stagewright.engine.pipeline.backward import BackwardState, run_backward, run_input_backward, run_weight_backward


@pytest.mark.parametrize("split", [False, True])
def test_no_gradient_is_not_a_zero(split: bool) -> None:
    """One output's gradient did not arrive: its branch and its input stay without, also where a zero would be lost."""
    used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    inputs = [torch.ones(1, 2, requires_grad=True), torch.zeros(1, 2, requires_grad=True)]
    outputs: list[torch.Tensor | None] = [used(inputs[0]), unused(inputs[0]).sqrt() + inputs[1].sqrt()]
    held, gradients = BackwardState(inputs, outputs), [torch.ones(1, 2), None]
    parameters = [*used.parameters(), *unused.parameters()]
    if split:
        found = run_input_backward(held, gradients, parameters)
        assert all(one.grad is None for one in parameters)
        run_weight_backward(held, parameters)
    else:
        found = run_backward(held, gradients)
    assert found[1] is None
    torch.testing.assert_close(found[0], used.weight.sum(dim=0, keepdim=True))
    torch.testing.assert_close(used.weight.grad, torch.ones(2, 2))
    assert unused.weight.grad is None


@pytest.mark.parametrize("split", [False, True])
def test_nothing_arrived(split: bool) -> None:
    layer, value = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    held, parameters = BackwardState([value], [layer(value)]), list(layer.parameters())
    if split:
        assert run_input_backward(held, [None], parameters) == [None]
        run_weight_backward(held, parameters)
    else:
        assert run_backward(held, [None]) == [None]
    assert layer.weight.grad is None


def test_two_halves_of_what_parameters_alone_make() -> None:
    """As a relative position bias: used in this stage, and sent on."""
    layer, table = nn.Linear(2, 2, bias=False), nn.Parameter(torch.ones(1, 2))
    value = torch.ones(1, 2, requires_grad=True)
    bias = table * 2
    held, parameters = BackwardState([value], [layer(value) * bias, bias.clone()]), [layer.weight, table]
    (found,) = run_input_backward(held, [torch.ones(1, 2), torch.full((1, 2), 10.0)], parameters)
    torch.testing.assert_close(found, 2 * layer.weight.sum(dim=0, keepdim=True))
    assert table.grad is None
    run_weight_backward(held, parameters)
    torch.testing.assert_close(table.grad, 2 * (10 + layer(value)).detach())
    torch.testing.assert_close(layer.weight.grad, torch.full((2, 2), 2.0))
