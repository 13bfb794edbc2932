"""Optimizer steps inside backward: the same parameters, and no gradient left."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from stagewright.engine.parallel.optimizer import OptimizerInBackward


def groups_of(model: nn.Sequential) -> list[dict[str, Any]]:
    return [
        {"params": model[0].parameters(), "lr": 0.1, "weight_decay": 0.5},
        {"params": [*model[1].parameters(), *model[2].parameters()], "lr": 0.01},
    ]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_equal_parameters(kind: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model = copy.deepcopy(expected)
    held: list[str] = []

    def count(parameter: nn.Parameter) -> Any:
        held.append(next(name for name, other in model.named_parameters() if other is parameter))
        assert parameter.grad is not None
        return nullcontext()

    in_backward = OptimizerInBackward(dict(model.named_parameters()), count)
    in_backward.optimizer, whole = kind(groups_of(model)), kind(groups_of(expected))
    for _ in range(3):
        x = torch.randn(5, 4)
        with in_backward.backward():
            model(x).square().sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        expected(x).square().sum().backward()
        whole.step()
        whole.zero_grad()
    assert len(held) == 3 * 6
    assert {name.split(".")[0] for name in held[:2]} == {"2"}, "the last layer has its gradients first"
    for one, other in zip(expected.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert in_backward.optimizer.param_groups[1]["params"] == [*model[1].parameters(), *model[2].parameters()]


def test_outside_of_the_block_gradients_stay() -> None:
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    in_backward = OptimizerInBackward(dict(model.named_parameters()), lambda _: nullcontext())
    in_backward.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight, before)


def test_copies_of_gradients() -> None:
    model = nn.Linear(3, 3)
    in_backward = OptimizerInBackward(dict(model.named_parameters()), lambda _: nullcontext())
    in_backward.optimizer, in_backward.gradients = torch.optim.SGD(model.parameters(), lr=1.0), {}
    with in_backward.backward():
        model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is None
    assert torch.equal(in_backward.gradients["weight"], torch.ones(3, 3))
