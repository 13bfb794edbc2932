"""Deferred running statistics equal those of one update with the whole batch, to 1e-6."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from stagewright.engine.batch.batch_norm import (
    DeferredBatchNorm,
    check_split_norms,
    find_tracked_norms,
    freeze_statistics,
    reject_sync_batch_norm,
)
from stagewright.engine.batch.microbatch import microbatch_sizes, split_sizes
from stagewright.engine.batch.random_key import random_key
from stagewright.engine.pipeline.activation_checkpointing import CheckpointedForward
from stagewright.errors import UsageError
from stagewright.graph import capture

CPU = torch.device("cpu")
SHAPES: dict[type[Any], tuple[int, ...]] = {
    nn.BatchNorm1d: (13, 5),
    nn.BatchNorm2d: (13, 5, 3, 2),
    nn.BatchNorm3d: (13, 5, 2, 2, 2),
}


def batch(kind: type[Any], number: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(SHAPES[kind], generator=generator) * 3 + torch.arange(5.0).view(
        5, *[1] * (len(SHAPES[kind]) - 2)
    )


def assert_same_statistics(actual: nn.Module, expected: nn.Module) -> None:
    for (name, a), (_, b) in zip(actual.named_buffers(), expected.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}, {"momentum": 0.4, "eps": 1e-3}])
@pytest.mark.parametrize("num", [1, 3, 4])
def test_equals_one_update_with_the_whole_batch(kind: type[Any], options: dict[str, Any], num: int) -> None:
    whole = kind(5, **options)
    norm, plain = copy.deepcopy(whole), copy.deepcopy(whole)
    names = list(norm.state_dict())
    with DeferredBatchNorm(norm) as deferred:
        for step in range(3):
            data = batch(kind, step)
            whole(data)
            for part in data.split(microbatch_sizes(13, num)):
                assert torch.equal(norm(part), plain(part))  # normalised by itself, as ever
            deferred.finish_step()
            assert_same_statistics(norm, whole)
            assert int(norm.num_batches_tracked) == step + 1
        assert list(norm.state_dict()) == names
    assert int(plain.num_batches_tracked) == 3 * num
    if num > 1:
        assert not torch.allclose(plain.running_mean, whole.running_mean, atol=1e-3)


def test_values_far_from_zero_do_not_cancel() -> None:
    whole = nn.BatchNorm1d(5).double()
    norm = copy.deepcopy(whole)
    data = batch(nn.BatchNorm1d).double() + 1e4
    whole(data)
    with DeferredBatchNorm(norm) as deferred:
        for part in data.split((5, 8)):
            norm(part)
        deferred.finish_step()
    assert_same_statistics(norm, whole)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_merged_over_replicas(momentum: float | None) -> None:
    whole = nn.Sequential(nn.BatchNorm1d(5, momentum=momentum), nn.Tanh(), nn.BatchNorm1d(5))
    whole[2].eval()  # a second norm that is never updated
    replicas = [copy.deepcopy(whole) for _ in range(3)]
    for step in range(2):
        data = batch(nn.BatchNorm1d, step)
        whole(data)
        deferred = [DeferredBatchNorm(replica) for replica in replicas]
        for deferred_norm, replica, part in zip(deferred, replicas, data.split(split_sizes(13, 3)), strict=True):
            deferred_norm.install()
            for microbatch in part.split(microbatch_sizes(len(part), 2)):
                replica(microbatch)
        sums = AllReduce(3)
        threads = [threading.Thread(target=deferred_norm.finish_step, args=(sums,)) for deferred_norm in deferred]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sums.seen == [((3 * 10,), torch.float64)] * 3
        for deferred_norm, replica in zip(deferred, replicas, strict=True):
            deferred_norm.remove()
            assert_same_statistics(replica, whole)


class AllReduce:
    """All-reduce over replicas that are threads."""

    def __init__(self, num_replicas: int) -> None:
        self.seen: list[Any] = []
        self._vectors: list[torch.Tensor] = []
        self._all_here = threading.Barrier(num_replicas, timeout=60)

    def __call__(self, vector: torch.Tensor) -> None:
        self.seen.append((tuple(vector.shape), vector.dtype))
        self._vectors.append(vector.clone())
        self._all_here.wait()
        vector.copy_(torch.stack(self._vectors).sum(0))


def test_a_replica_without_samples_gets_the_same_statistics() -> None:
    whole = nn.BatchNorm1d(5)
    busy, idle = copy.deepcopy(whole), copy.deepcopy(whole)
    data = batch(nn.BatchNorm1d)
    whole(data)
    sums: list[torch.Tensor] = []
    with DeferredBatchNorm(busy) as deferred_norm, DeferredBatchNorm(idle) as other_norm:
        busy(data)
        deferred_norm.finish_step(lambda flat: sums.append(flat.clone()))
        other_norm.finish_step(lambda flat: flat.add_(sums[0]))
    assert_same_statistics(busy, whole)
    assert_same_statistics(idle, whole)


def test_a_norm_called_twice_updates_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(5, momentum=0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.norm(x) ** 2 + x)

    # The first call of all micro-batches makes the first move; what the second sees is normalised by micro-batch.
    model = Twice()
    first, second = copy.deepcopy(model.norm), nn.BatchNorm1d(5, momentum=0.3)
    data = batch(nn.BatchNorm1d)
    seen = []
    with DeferredBatchNorm(model) as deferred:
        for number, part in enumerate(data.split((7, 6))):
            with random_key(seed=0, step=0, first_sample=7 * number, device=CPU):
                model(part)
            seen.append(nn.functional.batch_norm(part, None, None, training=True) ** 2 + part)
        deferred.finish_step()
    first(data)
    second.load_state_dict(first.state_dict())
    second(torch.cat(seen))
    assert_same_statistics(model.norm, second)
    assert int(model.norm.num_batches_tracked) == 2


def test_unaffected_modules() -> None:
    untracked = nn.BatchNorm1d(5, track_running_stats=False)
    frozen = nn.BatchNorm1d(5).eval()
    synchronised = nn.SyncBatchNorm(5)
    expected = frozen(batch(nn.BatchNorm1d))
    with DeferredBatchNorm(nn.Sequential(untracked, frozen, synchronised)) as deferred:
        assert deferred.norms == (frozen,)
        assert torch.equal(frozen(batch(nn.BatchNorm1d)), expected)
        untracked(batch(nn.BatchNorm1d))
        deferred.finish_step()
    assert int(frozen.num_batches_tracked) == 0
    assert torch.equal(frozen.running_mean, torch.zeros(5))
    assert find_tracked_norms(nn.Sequential(untracked, frozen, frozen)) == [frozen]


def test_remove_restores_the_modules() -> None:
    norm, plain = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
    deferred = DeferredBatchNorm(norm, norm)
    deferred.install()
    deferred.install()
    norm(batch(nn.BatchNorm1d))
    deferred.remove()
    assert "forward" not in norm.__dict__
    assert_same_statistics(norm, plain)  # an unfinished step moves nothing
    norm(batch(nn.BatchNorm1d))
    plain(batch(nn.BatchNorm1d))
    assert_same_statistics(norm, plain)
    assert norm.momentum == 0.1


def test_a_failed_forward_leaves_the_buffers_in_place() -> None:
    norm = nn.BatchNorm1d(5)
    mean = norm.running_mean
    with DeferredBatchNorm(norm) as deferred:
        with pytest.raises(ValueError, match="more than 1 value"):
            norm(torch.randn(1, 5))
        assert norm.running_mean is mean
        assert norm.momentum == 0.1
        deferred.finish_step()
    assert int(norm.num_batches_tracked) == 0


def test_sync_batch_norm_is_rejected() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    reject_sync_batch_norm(model, 1)
    with pytest.raises(UsageError, match="'1' is a SyncBatchNorm, which 2 workers"):
        reject_sync_batch_norm(model, 2)
    reject_sync_batch_norm(model.eval(), 2)


def test_a_replica_without_samples_is_not_counted() -> None:
    """It runs samples of another replica, to take part in the all-reduce."""
    x = batch(nn.BatchNorm1d)
    active, idle, alone = (nn.BatchNorm1d(5) for _ in range(3))
    gathered: list[torch.Tensor] = []
    with (
        DeferredBatchNorm(active) as deferred_norm,
        DeferredBatchNorm(idle) as other_norm,
        DeferredBatchNorm(alone) as third,
    ):
        active(x), idle(x), alone(x)
        other_norm.finish_step(lambda flat: gathered.append(flat.clone()), is_counted=False)
        deferred_norm.finish_step(lambda flat: flat.add_(gathered[0]))
        third.finish_step()
    torch.testing.assert_close(active.running_var, alone.running_var)
    assert gathered[0].count_nonzero() == 0


@pytest.mark.parametrize(
    ("workers", "deferred", "torn"),
    [([0, 1, 2], False, True), ([0, 1, 2], True, True), ([0, 1, 0], False, True), ([0, 1, 0], True, False)],
)
def test_a_norm_called_by_several_stages_is_rejected(workers: list[int], deferred: bool, torn: bool) -> None:
    shared = nn.BatchNorm1d(4)
    stages = [nn.Sequential(shared), nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.BatchNorm1d(4), shared)]
    model = nn.Sequential(*stages)
    with pytest.raises(UsageError, match=r"'0\.0' is called in stages 0 and 2") if torn else nullcontext():
        check_split_norms(model, stages, workers, deferred=deferred)
    shared.eval()  # frozen: nothing moves
    check_split_norms(model, stages, workers, deferred=deferred)


@pytest.mark.parametrize("mode", ["plain", "deferred"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_recomputed_forwards_do_not_count(mode: str, momentum: float | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5, momentum=momentum), nn.Tanh(), nn.Linear(5, 5))
    graph = capture(model, (torch.randn(3, 5),), units=["0", "1", "2", "3"])
    state = copy.deepcopy(model.state_dict())
    results = []
    for policy in ("none", "always"):
        model.load_state_dict(state)
        model.zero_grad()
        (stage,) = graph.stages([])
        forward = CheckpointedForward(stage, policy=policy, index=0, num_microbatches=2)
        deferred = DeferredBatchNorm(stage)
        if mode == "deferred":
            deferred.install()
        outputs = [forward((part,), at)[0] for at, part in enumerate(batch(nn.BatchNorm1d).split((7, 6)))]
        for output in outputs:
            output.square().mean().backward()
        if mode == "deferred":
            deferred.finish_step()
        deferred.remove()
        results.append([*model.buffers(), *(parameter.grad for parameter in model.parameters())])
        results[-1] = [tensor.clone() for tensor in results[-1]]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert int(model[1].num_batches_tracked) == (1 if mode == "deferred" else 2)


def test_freeze_statistics() -> None:
    norm = nn.BatchNorm1d(5)
    mean = norm.running_mean
    with freeze_statistics([norm]), freeze_statistics([norm]):
        output = norm(batch(nn.BatchNorm1d))
    assert norm.running_mean is mean
    assert torch.equal(mean, torch.zeros(5))
    assert int(norm.num_batches_tracked) == 0
    assert torch.equal(output, norm(batch(nn.BatchNorm1d)))
