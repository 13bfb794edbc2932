"""Where ``plan`` writes what it found, and what it says of codecs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from program import run_program
from stagewright.spec.plan_file import read_plan

CONFIG = {"model_type": "gpt2", "n_layer": 4, "n_embd": 512, "n_head": 8, "vocab_size": 512, "n_positions": 128}
# Hosts with one device each and a slow link between them: a codec gains.
CLUSTER = """
[[devices]]
kind = "cuda"
count = 1
hosts = 2
hardware = "A100"
[links.intra_host]
bandwidth = "250GB/s"
[links.inter_host]
bandwidth = "{bandwidth}"
"""
WORDS = ("plan", "hf:small", "--analytic", "--cluster", "gpus.toml", "--batch", "16")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "gpus.toml").write_text(CLUSTER.format(bandwidth="1Gbit/s"))
    return tmp_path


def test_the_best_plan_is_written(folder: Path) -> None:
    first = run_program(WORDS, cwd=folder, check=True)
    assert "wrote plan.toml" in first.stderr
    assert read_plan(folder / "plan.toml").batch == 16
    (folder / "plan.toml").write_text("# mine\n")
    again = run_program(WORDS, cwd=folder, check=True)
    assert "plan.toml exists, so the best plan was not written: -o plan.toml overwrites it" in again.stderr
    assert (folder / "plan.toml").read_text() == "# mine\n"
    run_program((*WORDS, "-o", "plan.toml"), cwd=folder, check=True)
    assert read_plan(folder / "plan.toml").batch == 16


def test_json_alone_writes_nothing(folder: Path) -> None:
    data = json.loads(run_program((*WORDS, "--json"), cwd=folder, check=True).stdout)
    assert data["written"] is None
    assert not (folder / "plan.toml").exists()
    data = json.loads(run_program((*WORDS, "--json", "-o", "best.toml"), cwd=folder, check=True).stdout)
    assert data["written"] == "best.toml"
    assert str(read_plan(folder / "best.toml").mesh) == data["best"][0]["mesh"]


def test_a_codec_that_gains_is_named_and_can_be_taken(folder: Path) -> None:
    data = json.loads(run_program((*WORDS, "--json"), cwd=folder, check=True).stdout)
    assert {one["codec"] for one in data["best"]} == {"none"}
    coded = data["with_codec"]
    assert coded["step_s"] < data["best"][0]["step_s"]
    taken = json.loads(run_program((*WORDS, "--codecs", coded["codec"], "--json"), cwd=folder, check=True).stdout)
    assert taken["best"][0]["step_s"] == pytest.approx(coded["step_s"])
    assert taken["with_codec"] is None
    shown = run_program(WORDS, cwd=folder, check=True).stdout
    assert f"it is lossy: --codecs {coded['codec']} allows it" in " ".join(shown.split())
    (folder / "gpus.toml").write_text(CLUSTER.format(bandwidth="100TB/s"))
    none = run_program(WORDS, cwd=folder, check=True).stdout
    assert "no codec on the links makes any plan faster than the best" in none
