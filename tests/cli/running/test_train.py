"""``stagewright train``: what it prints, what it keeps, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from stagewright.api.train import _plan
from stagewright.cli.running.train import train
from stagewright.cluster.device import usable_cores
from stagewright.errors import StagewrightError
from stagewright.report.tables.runs import summarize_training, train_table
from stagewright.runs.result import EpochResult, TrainingHistory
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan
from stagewright.spec.plan_file import write_plan

CORES = sorted(usable_cores())
DEVICES = f"cpu:{CORES[0]};cpu:{CORES[-1]}"

SCHOOL = """
from torch import nn
import torch
from stagewright.zoo import Batch, ImageInput, Model

def layers(num_classes): return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, num_classes))
def bare(): return layers(10), (torch.ones(4, 64),)
def small(): return good(4)
def good(num_classes=4):
    def example(size): return Batch(args=(torch.ones(size, 64),), target=torch.zeros(size, dtype=torch.long))
    inputs = ImageInput(channels=1, size=8, flatten=True)
    return Model(name="good", module=layers(num_classes), args=example(4).args, target=example(4).target,
                 loss=nn.functional.cross_entropy, batch_size=4, make_example=example, objective="classify",
                 num_classes=num_classes, inputs=inputs)
"""

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(train)


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Three epochs of the embedded default on a pipeline of two workers."""
    root = tmp_path_factory.mktemp("runs")
    words = ["--strategy", "pipeline=2", "--devices", DEVICES, "--cut", "vit.layers.1", "--checkpoint-every", "30"]
    return root, run("digits-vit", "digits", *words, "--root", root, "--save-weights", root / "weights", "--json")


def test_a_pipeline_learns_the_digits(trained: tuple[Path, Result]) -> None:
    _, result = trained
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(result.stdout)
    (one,) = found["runs"]
    assert found["mean"] == one["accuracy"] > 0.8
    assert (one["steps"], one["strategy"], found["metric"]) == (69, "pipeline", "accuracy")
    losses = [epoch["training_loss"] for epoch in one["epochs"]]
    assert losses == sorted(losses, reverse=True)
    for words in ("69 steps, 23 an epoch", "epoch 3, training loss", "samples/s", "left"):
        assert words in result.stderr


def test_its_checkpoint_and_weights_are_those_of_serial(trained: tuple[Path, Result]) -> None:
    """Going on serially after the last step changes nothing; the weights load under the model's own names."""
    root, first = trained
    again = run("digits-vit", "digits", "--resume", "--devices", "cpu:0", "--root", root, "--json")
    assert again.exit_code == 0, (again.output, again.exception)
    assert json.loads(again.stdout)["mean"] == json.loads(first.stdout)["mean"]
    assert "resuming from" in again.stderr
    assert "step-00000069" in again.stderr
    assert "batches were split into 4 micro-batches and are now split into 1 micro-batch; dropout" in again.stderr
    assert "replicas × --microbatches = 4" in again.stderr
    loaded = ModelSpec(name="digits-vit", weights=str(root / "weights")).load(batch=2)
    assert loaded.notes == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits-vit", "digit"], "unknown task 'digit'; did you mean 'digits'"),
        (["digits-vt", "digits"], "unknown model 'digits-vt'; did you mean 'digits-vit'"),
        (["digits-vit", "digits", "--seeds", "0;1"], "'0;1' is not a list of seeds"),
        (
            ["digits-vit", "digits", "--strategy", "pipeline=2", "--devices", "cpu:0"],
            "--devices gives 1; use --devices 2",
        ),
        (["digits-vit", "digits", "--clip", "0", "--devices", "cpu:0"], "clip = 0.0, but the maximum gradient norm"),
        (["digits-vit", "digits", "--clip", "nan", "--devices", "cpu:0"], "clip = nan, but the maximum gradient norm"),
        (["digits-vit", "digits", "--from", "nowhere"], "nowhere is neither a checkpoint nor a run"),
        (["digits-vit", "digits", "--resume"], "with batch 64 and seed 0; leave --resume out to start from scratch"),
        (["digits-vit", "digits", "--data-dir", "nowhere"], "--data-dir is 'nowhere', which is not a folder"),
        (["digits-vit", "rte"], "consists of texts, but the model 'digits-vit' takes images; compatible tasks: digits"),
        (["gpt-layers:2", "digits"], "consists of images, but the model 'gpt-layers:2' takes texts"),
        (["digits-vit", "digits", "--strategy", "pipeline=2", "--cut", "nope"], "unknown cut 'nope'; known: vit"),
        (
            ["digits-vit", "digits", "--batch", "2", "--strategy", "pipeline=2", "--devices", "cpu:0;cpu:0"],
            "a batch of 2",
        ),
    ],
)
def test_refusals(words: list[str], message: str, tmp_path: Path) -> None:
    result = run(*words, "--root", tmp_path)
    assert isinstance(result.exception, StagewrightError)
    assert result.exception.exit_code == 2
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_factory_that_a_task_cannot_feed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the task would pass, what the factory takes, and what to write; then it trains."""
    (tmp_path / "my_school.py").write_text(SCHOOL)
    monkeypatch.chdir(tmp_path)
    result = run("my_school:bare", "digits", "--devices", "cpu:0", "--root", tmp_path / "runs")
    told = str(result.exception)
    for words in ("num_classes=10", "takes no arguments", "stagewright.zoo.Model(…, inputs=ImageInput("):
        assert words in told
    result = run("my_school:small", "digits", "--devices", "cpu:0", "--root", tmp_path / "runs")
    assert "has 10 classes, but the model 'my_school:small' has 4, and the factory takes no arguments" in str(
        result.exception
    )
    assert not (tmp_path / "runs").exists()
    words = ["--devices", "cpu:0", "--epochs", "1", "--root", tmp_path / "runs", "--json"]
    result = run("my_school:good", "digits", *words)
    assert result.exit_code == 0, (result.output, result.exception)
    assert json.loads(result.stdout)["mean"] > 0.2


def test_another_seed_does_not_go_on_from_a_checkpoint(trained: tuple[Path, Result]) -> None:
    root, _ = trained
    (path,) = (one for one in root.iterdir() if one.name.endswith("pipeline-2"))
    result = run("digits-vit", "digits", "--from", path, "--seeds", "3", "--devices", "cpu:0", "--root", root)
    assert "was made with seed = 0, not 3" in str(result.exception)


def test_what_is_typed_wins_over_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    spec = OptimizerSpec(name="sgd", learning_rate=0.5, momentum=0.9)
    write_plan(
        Plan(model=ModelSpec(name="mlp"), batch=16, mesh=Mesh(pipeline=2), cuts=("a",), microbatches=2, optimizer=spec),
        file,
    )
    typed: dict[str, Any] = {"mesh": "serial", "batch": None}
    found = _plan(file, "mlp", {"learning_rate": 0.25, **typed}, num_classes=10)
    assert (found.mesh, found.cuts, found.microbatches, found.batch, found.epochs) == (Mesh(), (), 2, 16, 3)
    assert found.optimizer == OptimizerSpec(name="sgd", learning_rate=0.25, momentum=0.9)
    assert found.model.num_classes == 10
    assert _plan(file, "mlp", {}, num_classes=None).cuts == ("a",)


def test_spread_over_seeds() -> None:
    histories = [
        TrainingHistory(
            metric="accuracy",
            epochs=(
                EpochResult(
                    epoch=1, step=1, training_loss=1.0, evaluation_loss=2.0, score=seed / 10, samples_per_s=3.0
                ),
            ),
            seed=seed,
        )
        for seed in (7, 8, 9)
    ]
    assert summarize_training(histories) == {"mean": pytest.approx(0.8), "spread": pytest.approx(0.1)}
    assert summarize_training(histories[:1]) == {"mean": 0.7, "spread": 0.0}
    assert train_table(histories, "mine").notes == ("accuracy 0.8000 ± 0.1000 over 3 seeds",)


def test_a_model_with_classes_of_its_own(tmp_path: Path) -> None:
    """mlp-mnist has ten classes and no option for another number: the task does not ask for one."""
    words = ["--epochs", "1", "--devices", "cpu:0", "--clip", "2", "--root", tmp_path, "--json"]
    result = run("mlp-mnist", "digits", *words)
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(result.stdout)
    assert found["mean"] > 0.3
    folder = RunFolder.open(found["runs"][0]["run"])
    assert folder.plan().clip == 2.0
    norms = [line["gradient_norm"] for line in folder.metrics(0) if line["kind"] == "step"]
    assert len(norms) == 23
    assert all(0 < norm < 1e3 for norm in norms)
