"""What the help of a study says about its defaults is what it takes, full and quick."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module
from typing import Any

import pytest
import typer

from stagewright.cli.app import app
from stagewright.quantity import parse_bytes
from stagewright.studies.conduct.load import STUDIES

# Options whose defaults depend on a task or on the machine, or have no value to name.
CHOSEN = {"batch", "codecs", "data", "devices", "size", "tasks", "train_samples"}
NAMES = {"limit": "memory_bytes", "memory": "memory_bytes", "samples": "train_samples"}


def told(text: str, kind: str) -> str | None:
    """`4` of "Of pipelines. [default: 2,4,8; quick: 4]"."""
    found = re.search(rf"{kind}: ([^;\]]*)", text.rpartition("[")[2])
    return found.group(1) if found else None


def fits(words: str, value: Any) -> bool:
    """Whether words are a value: 2,4 · 88MiB · :2 for gpt-layers:2 · parameters,macs,… for more of them."""
    if isinstance(value, tuple):
        return words.split(",") == list(map(str, value))
    if isinstance(value, int) and words.endswith("iB"):
        return parse_bytes(words) == value
    return words.partition(",")[0] == str(value) or (words.startswith(":") and str(value).endswith(words))


@pytest.mark.parametrize("study", STUDIES)
def test_defaults_are_as_told(study: str) -> None:
    module = import_module(f"stagewright.studies.{study}.study")
    full = {one.name: one.default for one in fields(module.Options)}
    command = typer.main.get_command(app).commands["study"].commands[study]  # type: ignore[attr-defined]
    compared = 0
    for option in command.params:
        name = NAMES.get(option.name, option.name)
        text = (getattr(option, "help", None) or "").replace("\\[", "[")
        if name not in full or name in CHOSEN:
            continue
        default, quick = told(text, "default"), told(text, "quick")
        if default is not None and full[name] is not None:
            assert fits(default, full[name]), f"--{option.name}: {text} … but it is {full[name]!r}"
            compared += 1
        if module.QUICK.get(name, full[name]) != full[name]:
            assert quick is not None, f"--{option.name}: {text} … but quick has {module.QUICK[name]!r}"
        if quick is not None and name in module.QUICK:
            assert fits(quick, module.QUICK[name]), f"--{option.name}: {text} … but quick has {module.QUICK[name]!r}"
            compared += 1
    assert compared >= 3
