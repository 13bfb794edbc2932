"""Run folders made by hand: what workers would write, line by line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stagewright.engine.worker.faults import Activity
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Mesh, ModelSpec, Plan


@dataclass
class HandMade:
    """A run whose workers are played by a test."""

    folder: RunFolder
    records: dict[int, Activity] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder.path

    def begin(self, action: str, *, worker: int = 0, **numbers: Any) -> None:
        """A worker begins an action."""
        if worker not in self.records:
            self.records[worker] = Activity()
            self.records[worker].open(self.path / "workers" / str(worker) / "activity.txt")
        self.records[worker].begin(action, **numbers)

    def line(self, *, worker: int = 0, **values: Any) -> None:
        """A worker adds a line."""
        with self.folder.worker(worker) as own:
            own.append_metrics(**values)

    def step(self, number: int, *, worker: int = 0, **values: Any) -> None:
        """A worker ends a step of training."""
        told = {"epoch": 1, "loss": 1.0 / number, "samples": 8, "seconds": 0.5, "waited_s": 0.1, "memory_bytes": 2**20}
        self.line(worker=worker, kind="step", step=number, **{**told, **values})


PLAN = Plan(
    model=ModelSpec(name="digits-vit"),
    batch=8,
    mesh=Mesh(pipeline=2),
    microbatches=4,
    devices=("cpu:0", "cpu:1"),
    task="digits",
    epochs=2,
)


@pytest.fixture
def plan() -> Plan:
    return PLAN


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., HandMade]:
    """A folder with a plan and nothing else."""

    def make(plan: Plan = PLAN) -> HandMade:
        return HandMade(RunFolder.create(tmp_path / "runs", plan, environment={}))

    return make
