"""The command on the page makes the same plan: typed in, it asks for what had been run."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from made_runs import make_run, make_training
from stagewright.cli.running.compare import compare
from stagewright.report.page.content.command import reproduce_command
from stagewright.runs import RunFolder
from stagewright.spec import Mesh, ModelSpec, Plan
from stagewright.spec.plan import OptimizerSpec

app = typer.Typer()
app.command()(compare)

PLANS = [
    Plan(model=ModelSpec(name="mlp-mnist"), batch=9, devices=("cpu:0",), optimizer=OptimizerSpec(name="sgd")),
    Plan(model=ModelSpec(name="mlp-mnist"), batch=8, devices=("cpu:0",)),
    Plan(model=ModelSpec(name="digits-vit"), batch=64, mesh=Mesh(data=2), devices=("cpu:0", "cpu:1"), shard=True),
    Plan(
        model=ModelSpec(name="digits-vit", num_classes=7, seed=3),
        batch=64,
        mesh=Mesh(data=2, pipeline=2),
        microbatches=4,
        schedule="gpipe",
        split="macs",
        cuts=("vit.layers.0",),
        recompute="always",
        precision="bf16",
        training=False,
        memory_bytes=2**31,
        devices=("cpu:0", "cpu:1-2", "cpu:3", "cpu:4"),
        seed=3,
        steps=5,
        warmup=1,
    ),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.mesh))
def test_typed_again_it_is_the_same_plan(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Plan] = []

    def capture(plans: list[Plan], *_: Any, **__: Any) -> list[dict[str, Any]]:
        asked.extend(plans)
        raise typer.Exit

    monkeypatch.setattr("stagewright.api.compare.run_plans", capture)
    monkeypatch.setattr("stagewright.cluster.device.usable_cores", lambda: set(range(8)))  # where it had been run
    words = shlex.split(reproduce_command(RunFolder(tmp_path), plan))
    assert words[:2] == ["stagewright", "compare"]
    result = CliRunner().invoke(app, words[2:], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert asked == [plan]


def test_what_compare_can_not_be_told_runs_from_its_file(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "pipeline=2")
    plan = folder.plan()
    assert reproduce_command(folder, plan).startswith("stagewright compare digits-vit --strategy pipeline=2 ")
    file = folder.path / "plan.toml"
    for other in (
        replace(plan, codec="bf16"),
        replace(plan, optimizer=OptimizerSpec(learning_rate=0.5)),
        replace(plan, recompute=(True, False)),
        replace(plan, model=replace(plan.model, padded=True)),
    ):
        assert reproduce_command(folder, other) == f"stagewright run {file}"


def test_a_training_run_names_its_plan_and_data(tmp_path: Path) -> None:
    folder = make_training(tmp_path)
    file = folder.path / "plan.toml"
    assert reproduce_command(folder, folder.plan()) == f"stagewright train mlp-mnist digits --plan {file}"
    (folder.path / "training.json").write_text('{"data_dir": "/my data", "tokenizer": null, "checkpoint": null}')
    assert reproduce_command(folder, folder.plan()).endswith("--data-dir '/my data'")
