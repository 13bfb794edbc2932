"""A run by what a person types."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagewright.errors import UsageError
from stagewright.runs.choose import choose_run, newest_run

NAMES = ("2026-11-15-031502-gpt2-serial", "2026-11-15-031530-gpt2-data-2", "2026-11-16-090000-mlp-serial")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in NAMES:
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "plan.toml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_newest_path_and_prefix() -> None:
    assert choose_run() == newest_run() == Path("runs") / NAMES[2]
    assert choose_run(f"runs/{NAMES[0]}") == Path("runs") / NAMES[0]
    assert choose_run("2026-11-16") == Path("runs") / NAMES[2]
    assert choose_run("runs/2026-11-15-03153") == Path("runs") / NAMES[1]


@pytest.mark.usefixtures("folder")
def test_an_ambiguous_or_unknown_name_is_refused() -> None:
    with pytest.raises(UsageError, match="2026-11-15 begins the names of 2 runs: 2026-11-15-031530-gpt2-data-2, "):
        choose_run("2026-11-15")
    with pytest.raises(UsageError, match="unknown run '2026-11-17'; known: 2026-11-16"):
        choose_run("2026-11-17")


def test_without_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="there are no runs in runs; create some"):
        choose_run()
