"""docs/python.md is generated from the code and documents every public name with an example."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

import stagewright

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "make_python_page.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def entries(script: dict[str, Any]) -> dict[str, str]:
    """The page's text about each name."""
    parts = script["PAGE"].read_text(encoding="utf-8").split("\n### ")[1:]
    return {part.partition("\n")[0]: part.partition("\n")[2].partition("\n## ")[0] for part in parts}


def test_page_is_current(script: dict[str, Any]) -> None:
    written = script["PAGE"].read_text(encoding="utf-8")
    assert written == script["python_page"](), "run: python docs/make_python_page.py"


def test_every_public_name_is_there_once(entries: dict[str, str]) -> None:
    assert sorted(entries) == sorted(stagewright.__all__)


def test_every_name_is_described(entries: dict[str, str]) -> None:
    assert [name for name, text in entries.items() if not text.replace("```", "").strip()] == []


def test_every_function_has_an_example(entries: dict[str, str]) -> None:
    functions = [name for name in stagewright.__all__ if name[0].islower()]
    assert [name for name in functions if "```python" not in entries[name]] == []


def test_a_signature_is_as_in_the_code(entries: dict[str, str]) -> None:
    assert "    num_stages: int,\n" in entries["split"]
    assert "`microbatches: int = 1`" in entries["Plan"]
