"""Recorded steps for tests, without processes: ranks run one after the other and their gradients are reduced here."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stagewright as sw
from stagewright.verification.context import ROUNDING_VARIABLE
from stagewright.verification.diagnosis import diagnose
from stagewright.verification.record import RankRecord, save_record
from stagewright.verification.recorder import Recorder
from stagewright.verification.verdict import Verdict


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=generator), torch.randint(4, (8,), generator=generator)


def record_baseline(folder: Path, make: Callable[[], nn.Module] = build, lr: float = 0.1) -> None:
    """Record the plain step as the command does."""
    for name in ("exact", "repeated", "rounding-1", "rounding-2", "rounding-3"):
        os.environ[ROUNDING_VARIABLE] = name.partition("-")[2]
        model, (x, y) = make(), make_batch()
        with sw.verify(model, folder=folder / name):
            cross_entropy(model(x), y).backward()
            torch.optim.SGD(model.parameters(), lr=lr).step()
    del os.environ[ROUNDING_VARIABLE]


def record_replicas(
    folder: Path,
    *,
    make: Callable[[], nn.Module] = build,
    rows: Sequence[Sequence[int]] = (range(4), range(4, 8)),
    loss_factor: float = 1.0,
    reduce: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None,
    change: Callable[[int, Any], None] = lambda rank, model: None,
    lr: float = 0.1,
) -> None:
    """Record data-parallel ranks; ``reduce`` maps the local gradients of a parameter to those that the ranks use."""
    x, y = make_batch()
    first = make()
    models = [first, *(copy.deepcopy(first) for _ in rows[1:])]
    for rank, model in enumerate(models):
        change(rank, model)
    recorders = [Recorder([model], [None], None) for model in models]
    for recorder, model, index in zip(recorders, models, rows, strict=True):
        recorder.start()
        (cross_entropy(model(x[list(index)]), y[list(index)]) * loss_factor).backward()
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        local = [parameter.grad for parameter in parameters if parameter.grad is not None]
        mean = [sum(local) / len(local)] * len(local) if reduce is None else reduce(local)
        for parameter, gradient in zip(parameters, mean, strict=True):
            parameter.grad = gradient.clone()
    for rank, (recorder, model) in enumerate(zip(recorders, models, strict=True)):
        torch.optim.SGD(model.parameters(), lr=lr).step()
        recorder.finish()
        recorder.stop()
        save(folder, recorder, rank, len(rows), replica=rank)


def save(folder: Path, recorder: Recorder, rank: int, world: int, **fields: Any) -> None:
    """Write what a recorder has as one rank's record."""
    record = RankRecord(
        rank=rank,
        world_size=world,
        step=0,
        replica=fields.pop("replica", None),
        entries=tuple(recorder.entries),
        modules=recorder.modules(),
        tied=recorder.tied,
        **fields,
    )
    save_record(folder, record, recorder.tensors)


def verdict_of(folder: Path, **options: Any) -> Verdict:
    """Compare replicas with the baseline."""
    make = options.get("make", build)
    record_baseline(folder / "baseline", make)
    record_replicas(folder / "candidate", **options)
    return diagnose(folder / "baseline", folder / "candidate")
