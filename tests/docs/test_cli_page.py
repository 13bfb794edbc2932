"""docs/cli.md shows the current help of every command."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "make_cli_page.py"


def test_cli_page_is_current() -> None:
    script = runpy.run_path(str(SCRIPT))
    written = script["PAGE"].read_text(encoding="utf-8")
    assert written == script["cli_page"](), "run: python docs/make_cli_page.py"


def test_cli_page_has_every_command() -> None:
    script = runpy.run_path(str(SCRIPT))
    headings = re.findall(r"^## stagewright (\w+)$", script["PAGE"].read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings == script["commands"]()
    assert {"models", "profile", "split"} <= set(headings)
