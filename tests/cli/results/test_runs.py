from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from stagewright.cli.results.runs import runs
from stagewright.errors import UsageError
from stagewright.runs import RunFolder
from stagewright.spec import Mesh, ModelSpec, Plan

app = typer.Typer()
app.command()(runs)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    plan = Plan(model=ModelSpec(name="deit-small"), batch=8, mesh=Mesh(pipeline=2), microbatches=2)
    done = RunFolder.create(tmp_path, plan, environment={}, now=datetime(2026, 11, 15, 3))
    done.finish("done", {"samples_per_s": 123.44, "speedup": 1.875, "equal": True, "peak_memory_bytes": [2**21]})
    failed = RunFolder.create(tmp_path, plan, environment={}, now=datetime(2026, 11, 15, 4))
    failed.finish("failed", {"error": "worker 1 was killed"})
    return tmp_path


def test_table(root: Path) -> None:
    result = CliRunner().invoke(app, ["--root", str(root)])
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines() if "deit" in line]
    assert lines == [
        ["2026-11-15-040000-deit-small-pipeline-2", "failed", "8", "2", "1f1b"],
        [
            "2026-11-15-030000-deit-small-pipeline-2",
            "done",
            "8",
            "2",
            "1f1b",
            "123.4",
            "1.88",
            "×",
            "ok",
            "2.00",
            "MiB",
        ],
    ]
    assert "2026-11-15-040000-deit-small-pipeline-2: worker 1 was killed" in result.stderr


def test_json(root: Path) -> None:
    data = json.loads(CliRunner().invoke(app, ["--root", str(root), "--json"]).stdout)
    assert data["root"] == str(root)
    assert [run["status"] for run in data["runs"]] == ["failed", "done"]
    assert data["runs"][1]["samples_per_s"] == 123.44
    assert data["runs"][0]["error"] == "worker 1 was killed"


def test_nothing_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--root", str(tmp_path / "none")])
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "no runs in" in result.stderr
    assert json.loads(CliRunner().invoke(app, ["--root", str(tmp_path / "none"), "--json"]).stdout)["runs"] == []


def test_a_file_is_no_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["--root", str(tmp_path / "file")])
    assert isinstance(result.exception, UsageError)
    assert "is a file; --root names the folder" in str(result.exception)
