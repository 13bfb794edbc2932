"""DCP folders: what torch writes is resumed from, and torch reads what is exported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from stagewright.engine.parallel.parallelize import parallelize
from stagewright.engine.state.dcp import export_dcp, import_dcp
from stagewright.errors import DataMissing
from stagewright.spec.plan import ModelSpec, OptimizerSpec, Plan

PLAN = Plan(
    model=ModelSpec(name="net"), batch=8, devices=("cpu:0",), optimizer=OptimizerSpec(name="adamw", learning_rate=0.02)
)


@pytest.fixture(autouse=True)
def _leave_the_group() -> Iterator[None]:
    """Restore what `parallelize` changes in this process: process group, cores and threads."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def make_trainer() -> Any:
    return parallelize(make_model(), batch(0), plan=PLAN, loss=nn.functional.cross_entropy)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_training_continues_over_dcp_in_both_directions(tmp_path: Path) -> None:
    trainer = make_trainer()
    for step in range(2):
        trainer.step(batch(step))
    trainer.save(tmp_path / "ours")
    expected = [trainer.step(batch(step)).loss for step in (2, 3)]
    export_dcp(tmp_path / "ours", tmp_path / "dcp")

    plain = make_model()  # torch's own loop resumes from the export
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.02, weight_decay=PLAN.optimizer.weight_decay)
    names = {parameter: name for name, parameter in plain.named_parameters()}
    state = {f"model.{name}": value for name, value in plain.state_dict().items()}
    for parameter, name in names.items():
        optimizer.state[parameter] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter)}
        optimizer.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
        state |= {f"optimizer.state.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    losses = []
    for step in (2, 3):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses == pytest.approx(expected, rel=1e-6)

    import_dcp(tmp_path / "dcp", tmp_path / "back", step=2, optimizer="AdamW")
    resumed = make_trainer()
    resumed.load(tmp_path / "back")
    assert resumed.step_number == 2
    assert [resumed.step(batch(step)).loss for step in (2, 3)] == expected


def test_a_folder_without_metadata_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match=r"no \.metadata"):
        import_dcp(tmp_path, tmp_path / "back", step=0)
