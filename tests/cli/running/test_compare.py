"""``stagewright compare``: what is told beside the table."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from stagewright.api import compare as api
from stagewright.cli.running.compare import compare
from stagewright.runs.result import RunResult

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
