"""Optimizers on the local tensors of DTensors: the same values, and states where checkpoints look for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from stagewright.engine.parallel.optimizer import changes_elements, step_shards


@pytest.fixture
def mesh(lone_group: Any) -> DeviceMesh:
    return DeviceMesh("cpu", [0])


def parameters(mesh: DeviceMesh | None) -> list[nn.Parameter]:
    values = [torch.randn(shape, generator=torch.Generator().manual_seed(7)) for shape in ((4, 3), (5,), ())]
    return [
        nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]) if mesh is not None and value.ndim else value)
        for value in values
    ]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_steps_equal_the_plain_optimizer(mesh: DeviceMesh, kind: Any, options: dict[str, float]) -> None:
    plain, sharded = parameters(None), parameters(mesh)
    plain_optimizer, optimizer = kind(plain, **options), kind(sharded, **options)
    assert changes_elements(optimizer)
    for step in range(3):
        for index, (value, held) in enumerate(zip(plain, sharded, strict=True)):
            if step == 1 and index == 1:  # a parameter without a gradient keeps its value and states
                value.grad = held.grad = None
                continue
            value.grad = torch.full_like(value, 0.5 + step)
            local = value.grad.clone()
            held.grad = distribute_tensor(local, mesh, [Shard(0)]) if isinstance(held, DTensor) else local
        plain_optimizer.step()
        step_shards(optimizer)
    assert [id(value) for value in optimizer.param_groups[0]["params"]] == list(map(id, sharded))
    assert set(map(id, optimizer.state)) == set(map(id, sharded)), "no state of a local tensor is left behind"
    for value, held in zip(plain, sharded, strict=True):
        assert torch.equal(held.full_tensor() if isinstance(held, DTensor) else held, value)
        assert optimizer.state[held].keys() == plain_optimizer.state[value].keys()
        for key, expected in plain_optimizer.state[value].items():
            state = optimizer.state[held][key]
            assert isinstance(state, DTensor) == (isinstance(held, DTensor) and expected.ndim > 0)
            assert torch.equal(state.full_tensor() if isinstance(state, DTensor) else state, expected)


def test_a_failed_step_leaves_the_parameters_in_place(mesh: DeviceMesh) -> None:
    held = parameters(mesh)
    optimizer = torch.optim.SGD(held, lr=0.1)
    for value in held:
        value.grad = torch.zeros_like(value)
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step_shards(optimizer)
    assert [id(value) for value in optimizer.param_groups[0]["params"]] == list(map(id, held))


def test_optimizers_that_see_whole_tensors_keep_their_dtensors() -> None:
    class Own(torch.optim.SGD):
        pass

    own = Own([nn.Parameter(torch.zeros(2))], lr=0.1)
    assert not changes_elements(own)
