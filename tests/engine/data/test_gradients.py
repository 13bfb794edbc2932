"""Sums of gradients in buckets: what parameters hold afterwards, with one replica in a group of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stagewright.engine.data import gradients
from stagewright.engine.data.gradients import GradientSum, in_buckets
from stagewright.engine.worker.memory import MemoryTracker


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
    assert sums.finish()["data"] > 0

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


def test_a_tied_weight_without_a_gradient_keeps_none_and_its_bytes_have_a_name_of_their_own(lone_group: Any) -> None:
    used, unused = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    sums = GradientSum({0: [used, unused]}, tied=[(used, lone_group), (unused, lone_group)])
    (2 * used).sum().backward()
    assert sums.finish() == {"data": 0, "tied": 20}
    assert torch.equal(used.grad, torch.full((5,), 2.0))  # type: ignore[arg-type]
    assert unused.grad is None


def test_buckets_leave_in_one_order_whichever_parameters_a_replica_uses(
    lone_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collectives are matched by their order: replicas that route their samples differently must not differ in it."""
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)
    layers = nn.ModuleList(nn.Linear(1, size, bias=False) for size in (2, 3, 4))
    sums = GradientSum({0: list(layers.parameters())}, data_group=lone_group, overlap=True)
    sent: list[int] = []
    inside: list[int] = []
    all_reduce = dist.all_reduce

    def recorded(flat: torch.Tensor, **options: Any) -> Any:
        sent.append(len(flat) - 1)  # without the mark
        return all_reduce(flat, **options)

    monkeypatch.setattr(dist, "all_reduce", recorded)
    for used in ((0, 1, 2), (1, 2), (0, 1)):
        sent.clear()
        sums.last_backward(0)
        torch.stack([layers[at](torch.ones(1, 1)).sum() for at in used]).sum().backward()
        inside.append(len(sent))
        sums.stage_done(0)
        sums.finish()
        assert sent == [4, 3, 2]
    assert inside == [3, 2, 0], "as early as that allows"
    sums.close()


def test_buckets_of_several_types_are_in_the_order_in_which_they_are_complete() -> None:
    sizes = [(1, torch.float32), (2, torch.float16), (2, torch.float16), (2, torch.float16), (1, torch.float32)]
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in sizes]
    places = {id(one): at for at, one in enumerate(parameters)}
    assert [[places[id(one)] for one in bucket] for bucket in in_buckets(parameters, 8)] == [[1, 2], [0, 4], [3]]


def test_a_gradient_that_moves_to_its_bucket_is_not_counted_twice(lone_group: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    sums = GradientSum({0: list(model.parameters())}, data_group=lone_group, overlap=True)
    tracker = MemoryTracker(worker=0)
    tracker.follow_module(model)
    bucket_bytes = 4 * sum(one.numel() + 1 for one in model.parameters())  # each has a mark
    with tracker.tracking():
        sums.last_backward(0)
        model(torch.ones(3, 4)).sum().backward()
        assert tracker.report().peak.gradients == bucket_bytes
    sums.stage_done(0)
    sums.finish()
    sums.close()
