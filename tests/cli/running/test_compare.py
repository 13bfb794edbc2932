"""``stagewright compare``: what is told beside the table."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from stagewright.api import compare as api
from stagewright.cli.running.compare import compare
from stagewright.engine.worker.process import ProcessMark
from stagewright.runs.result import RunResult
from stagewright.runs.run_folder import RunFolder

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(compare)

TRACE = 'Traceback (most recent call last):\n  File "mine.py", line 3, in forward\nValueError: boom'


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
    """With runs that all fail in the same place."""

    def failed(plans: Any, root: Any, **options: Any) -> list[RunResult]:
        error = f"worker 0 (cpu:0) failed: ValueError: boom\n  at: step 0, stage 0\n{TRACE}"
        return [RunResult.of_plan(plan, status="failed", error=error) for plan in plans]

    monkeypatch.setattr(api, "run_plans", failed)
    return CliRunner().invoke(app, ["mlp-mnist", "--devices", "cpu:0;cpu:0", *words])


def test_the_traceback_of_a_failure_is_on_stderr_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, "--strategy", "serial,data")
    assert done.exit_code == 1, done.exception
    assert done.stderr.count(TRACE) == 1
    assert "data failed: worker 0 (cpu:0) failed: ValueError: boom\n  at: step 0, stage 0\n" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(("strategies", "told"), [("serial", True), ("serial,data", False)])
def test_shards_without_replicas_are_told(monkeypatch: pytest.MonkeyPatch, strategies: str, told: bool) -> None:
    done = run(monkeypatch, "--strategy", strategies, "--shard")
    assert ("--shard applies to data parallelism, and no strategy here has it" in done.stderr) is told


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_and_its_workers(number: signal.Signals, tmp_path: Path) -> None:
    words = ["mlp-mnist", "--devices", "cpu:0;cpu:0", "--strategy", "data,tensor", "--steps", "100000000"]
    command = [sys.executable, "-m", "stagewright", "compare", *words]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until_s = time.monotonic() + 200
        while len(list(tmp_path.glob("runs/*/workers/*/process.json"))) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until_s
            time.sleep(0.02)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out) == (130, ""), err
    last = "interrupted" if number == signal.SIGINT else "the run was ended by SIGTERM"
    assert err.splitlines()[-1] == f"stagewright: {last}"
    (folder,) = tmp_path.glob("runs/*data-2")
    assert len(list(tmp_path.glob("runs/2*"))) == 1, "the next strategy does not begin"
    result = RunFolder.open(folder).result()
    assert result is not None
    assert result.status == "interrupted"
    marks = [ProcessMark.read(path) for path in folder.glob("workers/*/process.json")]
    assert [mark.state() for mark in marks if mark is not None] == ["gone", "gone"]
