"""Sums of gradients in buckets: what parameters hold afterwards, with one replica in a group of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stagewright.engine.gradients import GradientSum


@pytest.fixture
def lone_group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_gradients_become_views_of_their_bucket_so_that_none_is_there_twice(lone_group: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    sums = GradientSum({0: list(model.parameters())}, data_group=lone_group, overlap=True)
    sums.last_backward(0)
    model(torch.ones(3, 4)).sum().backward()
    assert len({one.grad.untyped_storage().data_ptr() for one in model.parameters() if one.grad is not None}) == 1
    sums.stage_done(0)
    assert sums.finish() > 0

    plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    plain.load_state_dict(model.state_dict())
    plain(torch.ones(3, 4)).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    sums.close()


def test_a_second_step_adds_to_what_is_there_and_a_parameter_without_a_gradient_keeps_none(lone_group: Any) -> None:
    used, unused = nn.Linear(3, 1, bias=False), nn.Parameter(torch.ones(5))
    sums = GradientSum({0: [used.weight, unused]}, data_group=lone_group)
    for times in (1.0, 2.0):  # the second without forgetting the first
        used(torch.ones(1, 3)).sum().backward()
        sums.last_backward(0)
        sums.stage_done(0)
        sums.finish()
        assert torch.equal(used.weight.grad, torch.full((1, 3), times))  # type: ignore[arg-type]
    assert unused.grad is None
    sums.close()
