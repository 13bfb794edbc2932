from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from stagewright.cli.fabric.fabric import fabric
from stagewright.errors import RunError, StagewrightError, UsageError
from stagewright.fabric.results.run_folder import FabricFolder


def call(*words: str) -> Result:
    return CliRunner().invoke(fabric, list(words))


def run(root: Path, *words: str) -> Result:
    return call("run", "--root", str(root), *words)


def test_sizes(tmp_path: Path) -> None:
    done = run(tmp_path, "--sizes", "8,2600", "--ranks", "3", "--trials", "25", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["verified"] is True
    assert [layer["bytes"] for layer in result["layers"]] == [8, 2600]
    first = result["layers"][0]
    assert first["samples"] == 25
    assert 0 < first["p50_s"] <= first["p90_s"] <= first["max_s"]
    assert first["p99_s"] is None, "25 samples can't support it"
    assert first["algbw_bytes_per_s"] == pytest.approx(8 / first["p50_s"])
    assert first["busbw_bytes_per_s"] == pytest.approx(8 / first["p50_s"] * 4 / 3)
    folder = FabricFolder.open(result["folder"])
    assert folder.trials().num_trials == 25
    assert folder.result()["layers"] == result["layers"]
    assert (folder.path / "steps.parquet").is_file()


def test_table_and_figure(tmp_path: Path) -> None:
    done = run(
        tmp_path, "--sizes", "8,2600", "--ranks", "2", "--trials", "5", "--plot", str(tmp_path / "a.png"), "--pairs"
    )
    assert done.exit_code == 0, done.output
    assert "whole trial" in done.stdout
    assert "pairs alone" in done.stdout
    assert "the results of all 5 trials were checked and are correct" in done.stdout
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_sweep_prints_the_columns_of_nccl_tests(tmp_path: Path) -> None:
    done = run(tmp_path, "-b", "8", "-e", "64", "-f", "2", "--ranks", "2", "-n", "5", "--algorithm", "broadcast")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines() if line[:1] == " " and line.split()[0].isdigit()]
    assert [row[0] for row in rows] == ["8", "16", "32", "64"]
    assert [row[2:5] for row in rows] == [["float", "none", "0"]] * 4
    assert {row[8] for row in rows} == {"0"}
    assert "# Avg bus bandwidth" in done.stdout


def test_a_late_rank_is_blamed(tmp_path: Path) -> None:
    done = run(tmp_path, "--sizes", "2600", "--ranks", "4", "--trials", "20", "--late", "2:30ms", "--json")
    verdict = json.loads(done.stdout)["verdict"]
    assert (verdict["kind"], verdict["rank"]) == ("late-host", 2)


def test_a_threshold_is_an_exit_code(tmp_path: Path) -> None:
    few = ("--sizes", "8", "--ranks", "2", "--trials", "5")
    assert run(tmp_path, *few, "--fail-above", "p50=10s").exit_code == 0
    missed = run(tmp_path, *few, "--fail-above", "p50=1ns")
    assert missed.exit_code == 3
    assert "p50 is" in missed.stderr
    refused = run(tmp_path, *few, "--fail-above", "p99=10s")
    assert refused.exit_code == 3
    assert "5 samples are not enough for p99" in refused.stderr


def test_two_runs_are_compared(tmp_path: Path) -> None:
    few = ("--sizes", "8", "--ranks", "2", "--trials", "30", "--json")
    folders = [json.loads(run(tmp_path, *few, *more).stdout)["folder"] for more in ((), ("--late", "0:20ms"))]
    (change,) = json.loads(call("compare", *folders, "--json").stdout)["layers"]
    assert change["ratio"] > 5
    assert change["differs"] is True
    assert change["ratio_low"] <= change["ratio"] <= change["ratio_high"]
    assert "slower" in call("compare", *folders).stdout
    other = json.loads(run(tmp_path, "--sizes", "16", "--ranks", "2", "--trials", "5", "--json").stdout)["folder"]
    assert "no layer in common" in str(call("compare", folders[0], other).exception)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "nothing to send"),
        (["--sizes", "8", "--model", "mlp-mnist"], "exclude each other"),
        (["--sizes", "abc"], "'abc' is not a size"),
        (["--sizes", "8", "--algorithm", "rings"], "did you mean 'ring'"),
        (["--model", "mlp-mnst"], "did you mean 'mlp-mnist'"),
        (["--model", "mlp-mnist", "--algorithm", "broadcast"], "gradients need an all-reduce"),
        (["--sizes", "8", "--late", "9:1ms"], "rank 9 cannot be delayed"),
        (["--sizes", "8", "--late", "x"], "is not a delayed rank"),
        (["--sizes", "8", "--hosts", "a,b"], "share a secret"),
        (["--sizes", "8", "--hosts", "a:b"], "is not a host"),
        (["--sizes", "8", "--hosts", "a,b", "--engine", "gloo"], "ports on the hosts that ask for no token"),
        (["--sizes", "8", "--engine", "mpi"], "unknown engine 'mpi'"),
        (["--sizes", "8", "--engine", "gloo", "--overlap"], "--overlap needs the sockets engine"),
        (["--sizes", "8", "--engine", "gloo", "--streams", "2"], "--streams needs the sockets engine"),
        (["--sizes", "8", "--fail-above", "fast"], "is not a threshold"),
        (["--sizes", "8", "--plot", "a.txt"], "can't draw"),
        (["--sizes", "8", "--trials", "0"], "0 trials"),
        (["-b", "8"], "needs a last size"),
        (["--plan", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_wrong_input_is_reported_and_leaves_nothing(words: list[str], why: str, tmp_path: Path) -> None:
    done = run(tmp_path / "runs", *words)
    assert isinstance(done.exception, UsageError), done.output
    assert why in str(done.exception)
    assert not (tmp_path / "runs").exists()


def test_a_run_without_any_trial_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "stagewright.fabric.ranks.connections.check_congestion", lambda name: None
    )  # as of another host
    done = run(tmp_path, "--sizes", "8", "--ranks", "2", "--congestion", "nosuch")
    assert isinstance(done.exception, RunError)
    assert "cannot use congestion control 'nosuch'" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine", ["gloo", "nccl"])
def test_ports_without_a_token_need_a_trusted_network(engine: str, tmp_path: Path) -> None:
    done = run(tmp_path, "--sizes", "8", "--hosts", "198.18.0.1:7651,198.18.0.2:7651", "--engine", engine)
    assert isinstance(done.exception, UsageError)
    assert "add --trusted-network" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_compare_needs_runs(tmp_path: Path) -> None:
    done = call("compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert isinstance(done.exception, StagewrightError)
    assert "is not the folder of a fabric run" in str(done.exception)


def test_an_agent_needs_a_token_and_an_address(tmp_path: Path) -> None:
    assert "share a secret" in str(call("agent").exception)
    assert "is not an address" in str(call("agent", "--listen", "here").exception)
    (tmp_path / "token").write_text("short")
    assert "5 characters" in str(call("agent", "--token-file", str(tmp_path / "token")).exception)


@pytest.mark.slow
def test_the_issues_own_command(tmp_path: Path) -> None:
    done = run(tmp_path, "--model", "mlp-mnist", "--ranks", "4", "--trials", "200", "--json")
    result = json.loads(done.stdout)
    assert result["verified"] is True
    assert [layer["bytes"] for layer in result["layers"]] == [2600, 33024, 131584, 803840]
    assert all(layer["samples"] == 200 and layer["p99_s"] is not None for layer in result["layers"])
    # The job has 938 steps, and its time follows from them.
    mean_s = sum(layer["mean_s"] for layer in result["layers"])
    assert result["projected_s"] == pytest.approx(938 * mean_s)


@pytest.mark.slow
def test_a_plan_is_sent(tmp_path: Path) -> None:
    plan = 'batch = 16\nmicrobatches = 4\ncuts = ["fc2"]\n[model]\nname = "mlp-mnist"\n[mesh]\ndata = 2\npipeline = 2\n'
    (tmp_path / "plan.toml").write_text(plan)
    done = run(tmp_path / "runs", "--plan", str(tmp_path / "plan.toml"), "--trials", "5", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["ranks"] == 4
    names = [layer["name"] for layer in result["layers"]]
    assert names[:2] == ["stage 0 → 1", "stage 1 → 0"]
    # Two samples of 128 numbers cross; the gradients of a stage go in one bucket.
    assert result["layers"][0]["bytes"] == 2 * 128 * 4
    assert [layer["bytes"] for layer in result["layers"][2:]] == [803840 + 131584, 33024 + 2600]
