"""``stagewright run``: a plan file on this machine, and as tasks of Slurm's srun."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stagewright.cli.app import app
from stagewright.runs.run_folder import RunFolder, list_runs

TRAINED = """
task = "synthetic"
epochs = 1
checkpoint_every = 4
batch = 256
devices = ["cpu:0", "cpu:0"]
[model]
name = "digits-vit"
[mesh]
dp = 2
"""


@pytest.mark.slow
def test_a_plan_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = 'batch = 8\nmicrobatches = 2\nsteps = 1\nwarmup = 0\n[model]\nname = "mlp-mnist"\n[mesh]\npp = 2\n'
    (tmp_path / "plan.toml").write_text(plan)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["run", "plan.toml", "--devices", "cpu:0,cpu:0", "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    (row,) = json.loads(result.stdout)["rows"]
    assert (row["strategy"], row["equal"], row["workers"]) == ("pipeline", True, 2)
    shown = CliRunner().invoke(app, ["trace", "--json"])  # the newest run
    assert shown.exit_code == 0, (shown.output, shown.exception)
    assert json.loads(shown.stdout)["mesh"] == "pipeline=2"


@pytest.mark.slow
def test_two_tasks_of_slurm_train_and_resume(tmp_path: Path) -> None:
    """As srun starts them: no RANK, no agent; the second time they continue after the last step."""
    (tmp_path / "plan.toml").write_text(TRAINED)
    for attempt in (1, 2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        tasks = [
            subprocess.Popen(
                [sys.executable, "-m", "stagewright", "run", "plan.toml", "--resume"],
                cwd=tmp_path,
                env={
                    **os.environ,
                    "SLURM_PROCID": str(rank),
                    "SLURM_LOCALID": str(rank),
                    "SLURM_STEP_NUM_TASKS": "2",
                    "SLURM_JOB_ID": "1",
                    "SLURM_STEP_ID": "0",
                    "SLURM_STEP_NODELIST": "localhost",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                },
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        errors = [task.communicate(timeout=400)[1] for task in tasks]
        assert [task.returncode for task in tasks] == [0, 0], errors
        names = list_runs(tmp_path / "runs")
        assert len(names) == attempt
        result = RunFolder(tmp_path / "runs" / names[0]).result()
        assert result is not None
        assert result.history is not None
        assert result.history.steps == 4
        assert ("resuming from runs/" in errors[0]) == (attempt == 2)
        assert ("starting from scratch" in errors[0]) == (attempt == 1)
