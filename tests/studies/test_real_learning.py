"""The studies that train and that send in the very smallest size, for real, as a person types them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.studies.parts.test_training_recipe import cifar

from program import run_program
from stagewright.runs.predictions import Predictions
from stagewright.studies.codecs.options import Options
from stagewright.studies.fabric.options import why_no_lab
from stagewright.studies.parts.training import client_cuts, train_by_pipeline, train_in_one_process
from stagewright.studies.runner.run import ALONE, DISTURBED


def conduct(words: list[str], folder: Path, cache: Path) -> tuple[int, dict[str, Any], str]:
    environment = {**os.environ, "STAGEWRIGHT_CACHE": str(cache)}
    environment.pop("STAGEWRIGHT_DATA", None)
    done = run_program(words, cwd=folder, env=environment)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def is_whole(folder: Path, found: dict[str, Any]) -> None:
    for name in ("study.json", "table.md", "answers.md", "report.html", *found["figures"]):
        assert (folder / name).is_file(), name
    asked = json.loads((folder / "study.json").read_text())["questions"]
    answered = [answer["question"] for answer in found["answers"]]
    # Other programs may run beside this one.
    assert [question for question in answered if question not in (ALONE, DISTURBED)] == asked


@pytest.mark.long
def test_codecs_on_some_photographs(tmp_path: Path, shared_cache: Path) -> None:
    data = cifar(tmp_path / "data")
    words = [
        "study",
        "codecs",
        "--quick",
        "--data-dir",
        str(data),
        "--tasks",
        "cifar10",
        "--samples",
        "40,20",
        "--batch",
        "8",
        "--seeds",
        "0",
    ]
    words += ["--codecs", "none,block4/block8", "--epochs", "1", "--devices", "cpu:0,cpu:0", "--json"]
    code, found, told = conduct(words, tmp_path, shared_cache)
    assert code == 0, told
    folder = tmp_path / found["folder"]
    is_whole(folder, found)
    assert found["data"]["data-cifar10"] == {"kept": True, "train": 40, "judged": 20, "of": [60, 30]}
    rows = [dict(zip(found["tables"][0]["columns"], row, strict=True)) for row in found["tables"][0]["rows"]]
    assert [row["codec"] for row in rows] == ["none", "block4/block8"]
    assert rows[0]["compression ratio"] == "1.000"
    assert 0.15 < float(rows[1]["compression ratio"]) < 0.25
    assert rows[0]["crossing tensors"] == "[8,32,16,16], [8,1280]"
    assert found["data"]["prove-cifar10-block4_block8"]["equal"] is True
    trained = [found["data"][f"train-cifar10-{name}-0"]["epochs"] for name in ("none", "block4_block8")]
    assert trained[0][-1]["training_loss"] != trained[1][-1]["training_loss"]
    assert "starting with random weights" in (folder / "answers.md").read_text()
    rates = {int(size): int(size) / seconds for size, seconds in found["data"]["transfer-cifar10"]["sizes"].items()}
    assert rates[max(rates)] > rates[min(rates)]
    _goes_on(words, folder, found, tmp_path, shared_cache)


def _goes_on(words: list[str], folder: Path, found: dict[str, Any], root: Path, cache: Path) -> None:
    """Without its answers and with the mark of an interrupted study, the same command makes no part again."""
    about = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps({**about, "status": "running"}))
    (folder / "answers.md").unlink()
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "parts").iterdir()}
    code, again, told = conduct(words, root, cache)
    assert (code, again["folder"]) == (0, found["folder"]), told
    assert before == {path.name: path.stat().st_mtime_ns for path in (folder / "parts").iterdir()}
    assert (folder / "answers.md").is_file()


@pytest.mark.long
def test_strategies_without_data(tmp_path: Path, shared_cache: Path) -> None:
    words = ["study", "strategies", "--quick", "--batch", "128", "--seeds", "0", "--epochs", "1", "--steps", "1"]
    words += ["--microbatches", "2", "--workers", "2", "--policies", "even", "--large-batches", "512"]
    words += ["--devices", "cpu:0,cpu:0", "--json"]
    code, found, told = conduct(words, tmp_path, shared_cache)
    assert code == 0, told
    assert "training digits-vit on the embedded digits" in told
    folder = tmp_path / found["folder"]
    is_whole(folder, found)
    large = {name: row["ran"] for name, row in found["data"].items() if name.startswith("large-") and "ran" in row}
    assert not large["large-data-512"]
    assert large["large-pipeline-512"]
    assert large["large-accumulated-512"]
    rows = [dict(zip(found["tables"][0]["columns"], row, strict=True)) for row in found["tables"][0]["rows"]]
    assert [(row["experiment"], row["source of speed"]) for row in rows] == [
        ("plain torch loop", "measured"),
        ("data", "unverified forecast"),
        ("pipeline", "unverified forecast"),
    ]
    # Without dropout and batch norm, both learn the same but for rounding.
    assert float(rows[1]["accuracy %"]) == pytest.approx(float(rows[2]["accuracy %"]), abs=1.0)
    assert "batch 512 runs out of memory under data parallel and runs as a" in (folder / "answers.md").read_text()


@pytest.mark.long
def test_fabric(tmp_path: Path, shared_cache: Path) -> None:
    words = ["study", "fabric", "--quick", "--trials", "12", "--bucket-model", "digits-vit", "--bucket-trials", "4"]
    words += ["--networks", "clean,slow-link", "--json"]
    code, found, told = conduct(words, tmp_path, shared_cache)
    assert code == 0, told
    is_whole(tmp_path / found["folder"], found)
    clean = found["data"]["sent-mlp-mnist-clean"]
    assert [layer["bytes"] for layer in clean["layers"]] == [2600, 33024, 131584, 803840]
    assert clean["verified"]
    if not why_no_lab():
        slow = found["data"]["sent-mlp-mnist-slow-link"]
        assert slow["total"]["p50_s"] > 2 * clean["total"]["p50_s"]
        assert (slow["verdict"]["kind"], slow["verdict"]["rank"]) == ("slow-link", 2)
        left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert not [line for line in left.splitlines() if line.startswith(f"sw-lab-{os.getpid()}-")]
    else:
        assert "using this host's loopback instead" in told


@pytest.mark.slow
def test_what_is_wrong_is_told_at_once(tmp_path: Path, shared_cache: Path) -> None:
    (tmp_path / "empty").mkdir()
    for words, text in (
        (["codecs", "--data", "empty", "--tasks", "cifar10"], "has no parquet files of 'cifar10'"),
        (["codecs", "--data", "nowhere"], "does not exist"),
        (["codecs", "--samples", "many"], "write like 320,300"),
        (["strategies", "--tasks", "rte"], "needs its data: give --data-dir DIR"),
        (["strategies", "--workers", "3"], "even numbers"),
        (["fabric", "--model", "mlp-minst"], "mlp-mnist"),
        (["fabric", "--networks", "sunny"], "unknown network 'sunny'"),
    ):
        code, found, told = conduct(["study", *words, "--json"], tmp_path, shared_cache)
        assert (code, found) == (2, {}), told
        assert text in told
        assert not (tmp_path / "studies").exists()


@pytest.mark.long
def test_one_process_learns_what_a_pipeline_learns(tmp_path: Path) -> None:
    options = Options(batch=240, epochs=1, microbatches=1, devices=("cpu:0", "cpu:0"))
    cuts = client_cuts(options.plan("digits", "none", 0), 1, 1)
    plan = options.plan("digits", "block8", 0, cuts)
    assert cuts == ("vit.embeddings", "vit.layernorm")
    alone = train_in_one_process(plan, data=None, device="cpu:0")
    workers = train_by_pipeline(plan, tmp_path, data=None)
    assert alone["epochs"][-1]["accuracy"] == pytest.approx(workers["epochs"][-1]["accuracy"], abs=1.01 / 360)
    samples = [Predictions.from_dict(one["predictions"]) for one in (alone, workers)]
    assert samples[0] is not None
    assert samples[1] is not None
    assert samples[0].labels.tolist() == samples[1].labels.tolist(), "in the same order"
    assert np.count_nonzero(samples[0].predicted != samples[1].predicted) <= 2
    other = train_in_one_process(options.plan("digits", "sort3+1", 0, cuts), data=None, device="cpu:0")
    assert other["epochs"][-1]["training_loss"] != pytest.approx(alone["epochs"][-1]["training_loss"], abs=1e-6)
