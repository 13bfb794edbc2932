from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from made_runs import make_run
from stagewright.cli.results.report import report
from stagewright.errors import UnknownName, UsageError

app = typer.Typer()
app.command()(report)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs", number=0, step_s=0.1)
    make_run(tmp_path / "runs", "pipeline=2", number=1, step_s=0.08)
    return tmp_path


def test_page_markdown_and_figures(root: Path) -> None:
    files = {"-o": root / "page.html", "--markdown": root / "page.md", "--figures": root / "figures"}
    options = [str(word) for pair in files.items() for word in pair]
    result = CliRunner().invoke(app, [str(root / "runs"), *options, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    page = files["-o"].read_bytes()
    assert data["page"] == str(files["-o"])
    assert data["bytes"] == len(page)
    assert page.startswith(b"<!doctype html>")
    assert files["--markdown"].read_text().startswith("# digits-vit: serial, pipeline\n")
    assert [(run["label"], run["speedup"]) for run in data["runs"]] == [
        ("serial", 1.0),
        ("pipeline=2", pytest.approx(1.25)),
    ]
    names = sorted(Path(path).name for path in data["figures"])
    assert names == sorted(path.name for path in files["--figures"].iterdir())
    stems = sorted({Path(name).stem for name in names})
    assert stems == [
        "memory",
        "memory-over-time-pipeline-2",
        "memory-over-time-serial",
        "shares-pipeline-2",
        "shares-serial",
        "speed-up",
        "speedup-pipeline-2",
        "throughput",
        "timeline-pipeline-2",
        "timeline-serial",
    ]
    assert len(names) == 2 * len(stems), "each as .svg and .png"
    assert all(path.read_bytes()[:4] in (b"\x89PNG", b"<?xm") for path in files["--figures"].iterdir())


def test_without_json_it_says_what_was_written(root: Path) -> None:
    result = CliRunner().invoke(app, [str(root / "runs"), "-o", str(root / "page.html")], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "page.html: " in result.stderr
    assert "open it in a browser" in result.stderr


def test_the_newest(root: Path) -> None:
    words = [str(root / "runs"), "-o", str(root / "page.html"), "--newest", "1"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert "the newest 1 of 2 runs are shown and 1 older ones are left out: use --newest 2" in result.stderr
    data = json.loads(CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False).stdout)
    assert data["left_out"] == 1
    assert [run["label"] for run in data["runs"]] == ["pipeline=2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs", "-o", "no/page.html"], "-o no/page.html: there is no folder no; create it first: mkdir -p no"),
        (["runs", "-o", "runs"], "-o runs: it is a folder; name a file in it, like runs/report.html"),
        (["runs", "--markdown", "runs"], "--markdown runs: it is a folder; name a file in it, like runs/report.md"),
        (["runs", "--figures", "a-file"], "--figures a-file: a-file is a file; name a folder"),
        (["runs", "--figures", "a-file/below"], "--figures a-file/below: {root}/a-file is a file; name a folder"),
    ],
)
def test_wrong_places(root: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "a-file").write_text("kept")
    monkeypatch.chdir(root)
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert str(caught.value) == message.format(root=root)
    assert sorted(path.name for path in root.iterdir()) == ["a-file", "runs"], "nothing was written"


def test_a_folder_that_can_not_be_written_to(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(UsageError, match=r"-o page.html: the folder . is not writable; choose another"):
        CliRunner().invoke(app, ["runs", "-o", "page.html"], catch_exceptions=False)


def test_an_unknown_run(root: Path) -> None:
    with pytest.raises(UnknownName, match="did you mean '2026-11-15-031502-digits-vit-serial'"):
        CliRunner().invoke(app, [str(root / "runs" / "2026-11-15-031502-digits-serial")], catch_exceptions=False)
