"""The command: errors in one sentence, real processes, and the page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.verification import steps

from program import run_program
from stagewright.errors import UsageError
from stagewright.report.page.html import page_html
from stagewright.report.verification import verdict_page, verdict_table
from stagewright.verification.baseline_run import load_function
from stagewright.verification.launch import run_program as run_limited

SERIAL = """
import torch
from torch import nn
import stagewright as sw

def step(factor=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        with sw.verify(model, step=number):
            (model(x).square().mean() * factor).backward()
            optimizer.step()
            optimizer.zero_grad()

if __name__ == "__main__":
    step(2.0)
"""


@pytest.mark.slow
def test_the_command_runs_both_scripts(tmp_path: Path) -> None:
    (tmp_path / "serial.py").write_text(SERIAL)
    words = ["verify", "--baseline", "serial.py:step", "--candidate", f"{sys.executable} serial.py", "--step", "1"]
    done = run_program([*words, "--json", "-o", "page.html", "--records", "kept"], cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    verdict = json.loads(done.stdout)
    assert (verdict["cause"]["name"], list(verdict["first"])) == (
        "different initial weights",
        ["before the step", "forward", "backward"],
    )
    assert "different initial weights" in (tmp_path / "page.html").read_text()
    again = run_program(
        ["verify", "--baseline", "kept/baseline", "--candidate", "kept/baseline/repeated"], cwd=tmp_path
    )
    assert again.returncode == 0, again.stderr
    assert "The step equals the baseline's" in again.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--baseline", "serial.py", "--candidate", "x"], "names no function"),
        (["--baseline", "none.py:step", "--candidate", "x"], "there is no file none.py"),
    ],
)
def test_wrong_names_of_the_baseline(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_function(words[1])


def test_a_program_is_stopped_at_its_limit() -> None:
    done = run_limited([sys.executable, "-c", "print('begun', flush=True); import time; time.sleep(60)"], {}, 2.0)
    assert done.code is None


def test_the_page_shows_every_module(tmp_path: Path) -> None:
    verdict = steps.verdict_of(tmp_path, loss_factor=0.5)
    page = page_html(verdict_page(verdict, baseline="serial.py:step", candidate="torchrun train.py"))
    assert all(f">{name}<" in page for name in ("0", "1", "2", "3", "4"))
    assert "Likely cause: loss scaled" in page
    table = verdict_table(verdict)
    assert [str(cell) for cell in table.rows[2][:4]] == ["backward", "12", "6", "4"]
