"""Gradient all-reduce in buckets: gradients after a step, with one replica in its own process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stagewright.engine.data import gradient_allreduce
from stagewright.engine.data.gradient_allreduce import GradientAllReduce, bucket_parameters
from stagewright.engine.worker.memory import MemoryTracker


def test_gradients_become_views_of_their_bucket(lone_group: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    all_reduce = GradientAllReduce({0: list(model.parameters())}, data_group=lone_group, overlap=True)
    all_reduce.last_backward(0)
    model(torch.ones(3, 4)).sum().backward()
    assert (
        len({weight.grad.untyped_storage().data_ptr() for weight in model.parameters() if weight.grad is not None}) == 1
    )
    all_reduce.stage_done(0)
    assert all_reduce.finish()["data"] > 0

    plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    plain.load_state_dict(model.state_dict())
    plain(torch.ones(3, 4)).sum().backward()
    for weight, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight.grad, expected.grad)  # type: ignore[arg-type]
    all_reduce.close()


def test_gradients_accumulate_and_unused_parameters_have_none(lone_group: Any) -> None:
    used, unused = nn.Linear(3, 1, bias=False), nn.Parameter(torch.ones(5))
    all_reduce = GradientAllReduce({0: [used.weight, unused]}, data_group=lone_group)
    for times in (1.0, 2.0):  # without zeroing gradients in between
        used(torch.ones(1, 3)).sum().backward()
        all_reduce.last_backward(0)
        all_reduce.stage_done(0)
        all_reduce.finish()
        assert torch.equal(used.weight.grad, torch.full((1, 3), times))  # type: ignore[arg-type]
    assert unused.grad is None
    all_reduce.close()


def test_tied_weights_are_counted_separately_and_unused_ones_have_no_gradient(lone_group: Any) -> None:
    used, unused = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    all_reduce = GradientAllReduce({0: [used, unused]}, tied=[(used, lone_group), (unused, lone_group)])
    (2 * used).sum().backward()
    assert all_reduce.finish() == {"data": 0, "tied": 20}
    assert torch.equal(used.grad, torch.full((5,), 2.0))  # type: ignore[arg-type]
    assert unused.grad is None


def test_buckets_are_sent_in_the_same_order_for_any_used_parameters(
    lone_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collectives match by order, so replicas that route samples differently must send in the same order."""
    monkeypatch.setattr(gradient_allreduce, "BUCKET_BYTES", 1)
    layers = nn.ModuleList(nn.Linear(1, size, bias=False) for size in (2, 3, 4))
    all_reduce = GradientAllReduce({0: list(layers.parameters())}, data_group=lone_group, overlap=True)
    sent: list[int] = []
    inside: list[int] = []
    send = dist.all_reduce

    def recorded(flat: torch.Tensor, **options: Any) -> Any:
        sent.append(len(flat) - 1)  # without the flag
        return send(flat, **options)

    monkeypatch.setattr(dist, "all_reduce", recorded)
    for used in ((0, 1, 2), (1, 2), (0, 1)):
        sent.clear()
        all_reduce.last_backward(0)
        torch.stack([layers[index](torch.ones(1, 1)).sum() for index in used]).sum().backward()
        inside.append(len(sent))
        all_reduce.stage_done(0)
        all_reduce.finish()
        assert sent == [4, 3, 2]
    assert inside == [3, 2, 0], "as early as that allows"
    all_reduce.close()


def test_buckets_of_several_dtypes_are_ordered_by_completion() -> None:
    sizes = [(1, torch.float32), (2, torch.float16), (2, torch.float16), (2, torch.float16), (1, torch.float32)]
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in sizes]
    indices = {id(parameter): index for index, parameter in enumerate(parameters)}
    assert [[indices[id(member)] for member in bucket] for bucket in bucket_parameters(parameters, 8)] == [
        [1, 2],
        [0, 4],
        [3],
    ]


def test_memory_counts_a_bucketed_gradient_once(lone_group: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    all_reduce = GradientAllReduce({0: list(model.parameters())}, data_group=lone_group, overlap=True)
    tracker = MemoryTracker(worker=0)
    tracker.follow_module(model)
    bucket_bytes = 4 * sum(weight.numel() + 1 for weight in model.parameters())  # each has a flag
    with tracker.tracking():
        all_reduce.last_backward(0)
        model(torch.ones(3, 4)).sum().backward()
        assert tracker.report().peak.gradients == bucket_bytes
    all_reduce.stage_done(0)
    all_reduce.finish()
    all_reduce.close()
