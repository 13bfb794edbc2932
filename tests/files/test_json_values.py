from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stagewright.files.json_values import from_json, to_json


@dataclass(frozen=True, kw_only=True)
class Stage:
    name: str
    size: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Model:
    stages: tuple[Stage, ...]
    best: Stage | None = None
    sizes: Mapping[int, Stage] = field(default_factory=dict)
    pair: tuple[int, str] = (0, "")
    folder: Path | None = None
    names: list[str] = field(default_factory=list)


MODEL = Model(
    stages=(Stage(name="a", size=2.0), Stage(name="b")),
    best=Stage(name="a"),
    sizes={3: Stage(name="c")},
    pair=(4, "x"),
    folder=Path("runs/a"),
    names=["p", "q"],
)


def test_nested_dataclasses_come_back() -> None:
    written = to_json(MODEL)
    assert written["sizes"] == {"3": {"name": "c", "size": 1.0}}
    assert written["folder"] == "runs/a"
    assert from_json(Model, json.loads(json.dumps(written))) == MODEL


def test_missing_keys_take_defaults_and_unknown_keys_are_ignored() -> None:
    read = from_json(Model, {"stages": [{"name": "a", "size": 3, "color": "red"}], "version": 2})
    assert read == Model(stages=(Stage(name="a", size=3.0),))
    assert isinstance(read.stages[0].size, float)
    with pytest.raises(ValueError, match="stages"):
        from_json(Model, {})
