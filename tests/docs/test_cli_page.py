"""docs/cli.md is what the program says of itself."""

from __future__ import annotations

import runpy
from pathlib import Path

from stagewright.cli.app import app

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "make_cli_page.py"


def test_cli_page_is_current() -> None:
    script = runpy.run_path(str(SCRIPT))
    written = script["PAGE"].read_text(encoding="utf-8")
    assert written == script["cli_page"](), "run: python docs/make_cli_page.py"


def test_cli_page_has_every_verb() -> None:
    verbs = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    assert verbs == list(runpy.run_path(str(SCRIPT))["VERBS"])
