"""docs/python.md is made from the code, and has every public name."""

from __future__ import annotations

import runpy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import stagewright

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "make_python_page.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def sections(script: dict[str, Any]) -> dict[str, str]:
    """What the page says of each package."""
    parts = script["PAGE"].read_text(encoding="utf-8").split("\n## ")[1:]
    return {part.partition("\n")[0]: part for part in parts}


def test_page_is_current(script: dict[str, Any]) -> None:
    written = script["PAGE"].read_text(encoding="utf-8")
    assert written == script["python_page"](), "run: python docs/make_python_page.py"


def test_every_public_name_is_there(script: dict[str, Any], sections: dict[str, str]) -> None:
    assert list(sections) == [group.package for group in script["GROUPS"]]
    assert all(f"\n### {name}\n" in sections["stagewright"] for name in stagewright.__all__)
    for group in script["GROUPS"]:
        names = import_module(group.package).__all__ if not group.modules else []
        missing = [name for name in names if f"### {name}\n" not in sections[group.package]]
        assert all(name in stagewright.__all__ for name in missing), (group.package, missing)


def test_names_can_be_imported_as_the_page_says(script: dict[str, Any]) -> None:
    for group in script["GROUPS"]:
        for module, names in group.modules.items():
            found = import_module(f"{group.package}.{module}")
            assert all(hasattr(found, name) for name in names), (group.package, module)


def test_everything_says_what_it_is(sections: dict[str, str]) -> None:
    for package, text in sections.items():
        for entry in text.split("\n### ")[1:]:
            name, _, rest = entry.partition("\n")
            assert rest.split("```")[-1].strip(), f"{package}.{name} has no docstring or comment"


def test_a_signature_and_fields_are_as_in_the_code(sections: dict[str, str]) -> None:
    signature = 'split(profile: Profile, num_stages: int, policy: str = "optimal", conditions: Conditions = …) -> Split'
    assert signature in sections["stagewright"]
    assert "- `microbatches: int = 1`: chunks into which each replica cuts" in sections["stagewright.spec"]
    assert "- `name`: the full name, by which it is found again" in sections["stagewright.codecs"]
    assert "`client_first: int | None = None`, `client_last: int | None = None`" in sections["stagewright.partition"]
