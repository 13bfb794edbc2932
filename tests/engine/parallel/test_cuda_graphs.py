"""The trainer with CUDA graphs, whose slots run again on a CPU; `jobs/test_shared_gpu.py` tests them on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stagewright as sw
from stagewright.engine.parallel import model_part
from stagewright.errors import UsageError


def losses_of(*, cuda_graphs: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    batch = torch.randn(8, 6), torch.randint(3, (8,))
    plan = sw.Plan.of("small", 8, microbatches=2, cuda_graphs=cuda_graphs)
    trainer = sw.parallelize(model, batch, plan=plan, loss=nn.functional.cross_entropy)
    losses = [trainer.step(batch).loss for _ in range(3)]
    return [*losses, trainer.evaluate(batch).loss]


def test_steps_in_slots_equal_plain_ones(monkeypatch: pytest.MonkeyPatch, lone_group: Any) -> None:
    monkeypatch.setattr(model_part, "check_recordable", lambda *_: None)
    assert losses_of(cuda_graphs=True) == losses_of(cuda_graphs=False)


def test_a_cpu_has_no_cuda_graphs(lone_group: Any) -> None:
    with pytest.raises(UsageError, match="cuda_graphs = true needs a GPU, and this worker runs on cpu: leave it out"):
        losses_of(cuda_graphs=True)
