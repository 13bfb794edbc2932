"""The record of ``benchmarks/capture_libraries.py``: enough models of each library, and a way out of each refusal."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORD = json.loads((ROOT / "docs" / "measured" / "capture_libraries.json").read_text(encoding="utf-8"))
MODELS: list[dict[str, Any]] = RECORD["models"]
OUTCOMES = [(row["name"], mode, row[mode]) for row in MODELS for mode in ("eval", "train")]
NUM_MODELS = {"diffusers": 25, "x-transformers": 8, "timm": 60, "torchvision": 30, "MONAI": 12, "PEFT": 10}
_FIX = re.compile(
    r"set |use |pass |keep that code|move that code|give the model|capture again|draw random numbers|keep such a value"
)


def test_enough_models_of_each_library() -> None:
    counts = Counter(row["group"] for row in MODELS)
    assert {group: counts[group] for group, number in NUM_MODELS.items() if counts[group] < number} == {}
    names = {row["name"] for row in MODELS}
    assert {"lightning", "lora", "quantized", "parametrize", "weight-norm", "forward-hooks", "backward-hooks"} <= names
    assert {"tv-fcn_resnet50", "tv-deeplabv3_mobilenet_v3_large", "tv-ssdlite320_mobilenet_v3_large"} <= names


def test_almost_all_models_pass() -> None:
    for mode in ("eval", "train"):
        assert sum(row[mode]["passed"] for row in MODELS) >= 0.95 * len(MODELS)


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/my-own-model.md"])
def test_pages_give_the_numbers_of_the_record(page: str) -> None:
    passed = sum(row["eval"]["passed"] and row["train"]["passed"] for row in MODELS)
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.search(rf"\b{passed} of {len(MODELS)}\b|\b{len(MODELS)} models of diffusers.* {passed} can", text)


@pytest.mark.parametrize(("name", "mode", "outcome"), OUTCOMES, ids=[f"{name}-{mode}" for name, mode, _ in OUTCOMES])
def test_models_pass_or_are_refused_with_a_way_out(name: str, mode: str, outcome: dict[str, Any]) -> None:
    if outcome["passed"]:
        assert (outcome["reason"], outcome["refused"]) == ("", False)
    else:
        assert outcome["refused"], outcome["reason"]
        assert "\n" not in outcome["reason"]
        assert _FIX.search(outcome["reason"]), outcome["reason"]
