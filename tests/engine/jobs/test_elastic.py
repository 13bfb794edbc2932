"""Training that goes on after a lost worker."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.cluster.device import usable_cores
from stagewright.engine.jobs.elastic import next_plan, train_elastic
from stagewright.engine.jobs.train import TrainingOptions, train
from stagewright.engine.state.checkpoint import latest
from stagewright.errors import RunError
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan

CORES = sorted(usable_cores())
PLAN = Plan.of(
    "digits-vit",
    256,
    "data=2",
    task="digits",
    epochs=1,
    checkpoint_every=2,
    devices=(f"cpu:{CORES[0]}", f"cpu:{CORES[-1]}"),
)


@pytest.fixture(autouse=True)
def _jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    support = str(Path(__file__).parents[1] / "support")
    monkeypatch.setenv("PYTHONPATH", support, prepend=os.pathsep)
    monkeypatch.syspath_prepend(support)
    monkeypatch.setenv("STAGEWRIGHT_TEST_KILLS", str(tmp_path / "kills"))


def losses(root: Path) -> list[float]:
    """The evaluation losses of the last run under a root."""
    folder = RunFolder(max(path for path in root.iterdir() if not path.name.startswith(".")))
    result = folder.result()
    assert result is not None
    assert result.history is not None
    return [epoch.evaluation_loss for epoch in result.history.epochs]


def run(root: Path, kills: int, max_restarts: int) -> list[str]:
    notes: list[str] = []
    (root / "kills").write_text(str(kills))
    train_elastic(
        PLAN,
        root / "runs",
        options=TrainingOptions(),
        max_restarts=max_restarts,
        note=notes.append,
        job="training_jobs:killed_before_step_4",
    )
    return notes


@pytest.mark.slow
def test_a_lost_worker_costs_only_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    (note,) = run(tmp_path, kills=1, max_restarts=1)
    assert note.startswith("restart 1 of 1, data=2, from ")
    assert "step-00000002: worker 1" in note
    train(PLAN, tmp_path / "whole")
    assert losses(tmp_path / "runs") == losses(tmp_path / "whole")
    (whole,), (*_, ended) = (sorted((tmp_path / root).glob("*/predictions.csv")) for root in ("whole", "runs"))
    assert whole.read_text() == ended.read_text()
    assert len(whole.read_text().splitlines()) == 361


@pytest.mark.long
def test_a_device_that_is_lost_twice_is_left_out(tmp_path: Path) -> None:
    notes = run(tmp_path, kills=2, max_restarts=2)
    assert [note.partition(", from")[0] for note in notes] == ["restart 1 of 2, data=2", "restart 2 of 2, serial"]
    first = min(path for path in (tmp_path / "runs").iterdir() if not path.name.startswith("."))
    checkpoint = latest(first / "checkpoints")
    smaller = next_plan(PLAN, 1, stays_away=True)
    train(smaller, tmp_path / "whole", options=TrainingOptions(checkpoint=str(checkpoint)))
    assert losses(tmp_path / "runs") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_no_more_restarts_than_allowed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"worker 1 .* was killed: SIGKILL"):
        run(tmp_path, kills=1, max_restarts=0)


def test_the_next_plan() -> None:
    assert next_plan(PLAN, 1, stays_away=False) == PLAN
    assert next_plan(PLAN, None, stays_away=True) == PLAN
    smaller = next_plan(replace(PLAN, shard=True), 1, stays_away=True)
    assert (str(smaller.mesh), smaller.devices, smaller.shard) == ("serial", PLAN.devices[:1], False)
    assert smaller.batch == PLAN.batch
    mesh = Plan.of("digits-vit", 12, "data=3,pipeline=2", microbatches=2, devices=tuple(f"cpu:{n}" for n in range(6)))
    assert next_plan(mesh, 3, stays_away=True).devices == ("cpu:0", "cpu:1", "cpu:4", "cpu:5")
    pipeline = Plan.of("digits-vit", 12, "pipeline=2", microbatches=2, devices=("cpu:0", "cpu:1"))
    assert next_plan(pipeline, 1, stays_away=True) == pipeline
