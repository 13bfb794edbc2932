"""The command line of a study comes from its declared options: names, help and defaults."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
import typer

from stagewright.cli.app import app
from stagewright.cli.study.command import _parse
from stagewright.quantity import parse_bytes, parse_s
from stagewright.studies.framework.options import declared_options, help_of, quick_values
from stagewright.studies.runner.load import STUDIES, options_class

SHARED = {"quick", "resume", "restart", "root", "json"}
# Options whose default depends on the task, the data or the machine.
CHOSEN = {
    "client",
    "tasks",
    "data",
    "weights",
    "devices",
    "train_samples",
    "learning_rate",
    "size",
    "fits",
    *("batch", "batches"),
}


def commands(study: str) -> dict[str, Any]:
    command = typer.main.get_command(app).commands["study"].commands[study]  # type: ignore[attr-defined]
    return {option.name: option for option in command.params if option.name != "help"}


def shown(text: str, kind: str) -> str | None:
    """`4` of "Micro-batches of pipelines. [default: 2,4,8; quick: 4]"."""
    match = re.search(rf"{kind}: ([^;\]]*)", text.rpartition("[")[2])
    return match.group(1) if match else None


def is_written_as(text: str, value: Any) -> bool:
    if isinstance(value, tuple):
        return re.split(", ?", text) == list(map(str, value))
    if text.endswith("iB"):
        return parse_bytes(text) == value
    return text == str(value) or (isinstance(value, float) and parse_s(text) == value)


@pytest.mark.parametrize("study", STUDIES)
def test_the_help_shows_the_defaults(study: str) -> None:
    options = options_class(study)
    full, quick = {field.name: field.default for field in fields(options)}, quick_values(options)
    compared = 0
    for name in declared_options(options):
        text = help_of(options, name)
        if name in CHOSEN or name == "where" or full[name] in (None, False):
            continue
        default = shown(text, "default")
        assert is_written_as(default or "", full[name]), f"{name}: {text}, default {full[name]!r}"
        if name in quick:
            quick_text = shown(text, "quick")
            assert is_written_as(quick_text or "", quick[name]), f"{name}: {text}"
        compared += 1
    assert compared >= 3


@pytest.mark.parametrize("study", STUDIES)
def test_the_command_has_every_declared_option(study: str) -> None:
    options = options_class(study)
    assert set(commands(study)) == set(declared_options(options)) | SHARED
    for name in declared_options(options):
        assert commands(study)[name].help.replace("\\[", "[") == help_of(options, name)


@pytest.mark.parametrize(
    ("study", "name", "flags"),
    [
        ("memory", "memory_bytes", ["--memory"]),
        ("strategies", "train_samples", ["--samples"]),
        ("strategies", "large_batches", ["--large-batches"]),
        ("codecs", "how", ["--one-process"]),
        ("fabric", "where", ["--loopback"]),
        ("fabric", "time_limit_s", ["--time-limit"]),
        ("stages", "image_size", ["--image-size"]),
    ],
)
def test_names_of_options(study: str, name: str, flags: list[str]) -> None:
    assert commands(study)[name].opts == flags


@pytest.mark.parametrize(
    ("study", "typed", "given"),
    [
        ("strategies", {"train_samples": "320,300"}, {"train_samples": 320, "judged_samples": 300}),
        ("strategies", {"train_samples": "320"}, {"train_samples": 320, "judged_samples": 320}),
        ("strategies", {"large_batches": "0"}, {"large_batches": ()}),
        ("codecs", {"how": True}, {"how": "one-process"}),
        ("codecs", {"how": False}, {"how": "pipeline"}),
        ("fabric", {"where": True, "time_limit_s": "1min"}, {"where": "loopback", "time_limit_s": 60.0}),
        ("memory", {"memory_bytes": "1GiB", "devices": "cpu:0,cpu:1"}, {"memory_bytes": 2**30}),
        ("stages", {"stages": "2, 4", "policies": "blocks,time"}, {"stages": (2, 4), "policies": ("blocks", "time")}),
    ],
)
def test_typed_text_becomes_values(study: str, typed: dict[str, Any], given: dict[str, Any]) -> None:
    declared = declared_options(options_class(study))
    values = _parse(declared, dict.fromkeys(declared) | typed)
    assert given.items() <= values.items()
    assert values.get("devices") in (None, ("cpu:0", "cpu:1"))
