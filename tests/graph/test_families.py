"""A sample of the families that ``benchmarks/capture_families.py`` tries, and its page against the list of families."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = (
    "vit",
    "swin",
    "mobilenet-v2",
    "segformer",
    "bert-padded",
    "albert",
    "deberta-v2",
    "gpt2",
    "llama-padded",
    "mixtral",
    "mamba",
    "t5",
    "wav2vec2",
    "clip",
)
PLAIN = (
    "mlp",
    "u-net",
    "nn-transformer",
    "lstm",
    "shared-weights",
    "several-outputs",
    "in-place",
    "changing-buffers",
    "control-flow-inside",
    "control-flow-between",
)
LEAF = ("bert-padded", "u-net", "lstm", "several-outputs", "changing-buffers")


@pytest.fixture(scope="module")
def families() -> Iterator[dict[str, Any]]:
    """The families by name; they live beside the benchmark that sweeps over all of them."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield {family.name: family for family in importlib.import_module("families").FAMILIES}
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def comparison(families: dict[str, Any]) -> ModuleType:
    """What compares a graph with its model."""
    return importlib.import_module("families.check")


def both_modes(names: tuple[str, ...], few: int) -> list[Any]:
    """Training compares all that evaluation does and more: only a few are evaluated, too, in a usual run."""
    evaluated = [
        pytest.param(name, False, marks=[pytest.mark.long] if at >= few else []) for at, name in enumerate(names)
    ]
    return [*(pytest.param(name, True) for name in names), *evaluated]


@pytest.mark.parametrize(("name", "training"), [*both_modes(SAMPLE, 4), *both_modes(PLAIN, 4)])
def test_graph_and_stages_equal_the_model(
    name: str, training: bool, families: dict[str, Any], comparison: ModuleType
) -> None:
    outcome = comparison.check(families[name], training=training, units="auto")
    assert outcome.reason == ""
    assert outcome.passed


@pytest.mark.parametrize(("name", "training"), both_modes(LEAF, 1))
def test_graph_and_stages_equal_the_model_at_leaf_level(
    name: str, training: bool, families: dict[str, Any], comparison: ModuleType
) -> None:
    assert comparison.check(families[name], training=training, units="leaf").reason == ""


def test_what_crosses_the_middle_is_the_hidden_state_and_the_mask(
    families: dict[str, Any], comparison: ModuleType
) -> None:
    plain = comparison.check(families["roberta"], training=False, units="auto", batch_sizes=(2, 3))
    padded = comparison.check(families["roberta-padded"], training=False, units="auto", batch_sizes=(2, 3))
    hidden_bytes = 2 * 12 * 32 * 4
    assert (plain.num_crossing, plain.crossing_bytes) == (1, hidden_bytes)
    assert padded.num_crossing == 2


def test_control_flow_between_units_is_rejected_with_its_line(families: dict[str, Any], comparison: ModuleType) -> None:
    from stagewright.errors import CaptureError
    from stagewright.graph import capture

    family = families["control-flow-between"]
    source = (ROOT / "benchmarks" / "families" / "plain.py").read_text().splitlines()
    line = source.index("        if x.sum() > 0:") + 1
    with pytest.raises(CaptureError) as caught:
        capture(family.build(), *family.example(2))
    message = str(caught.value)
    assert f"plain.py:{line}" in message
    assert "if x.sum() > 0:" in message
    assert "nn.Sequential" in message
    assert "unit" in message


def test_families_are_as_many_as_promised(families: dict[str, Any]) -> None:
    groups = {family.group for family in families.values()}
    assert {"vision", "encoder", "decoder", "mixture of experts", "state space", "encoder-decoder", "speech"} <= groups
    classes = {family.model_class for family in families.values() if family.group != "plain"}
    assert len(classes) >= 70
    assert len([family for family in families.values() if family.group == "plain"]) >= 8


def test_the_page_is_of_these_families_and_enough_pass(families: dict[str, Any]) -> None:
    data = json.loads((ROOT / "docs" / "capture-families.json").read_text())
    assert [entry["name"] for entry in data["families"]] == list(families)
    for mode in ("eval", "train"):
        passed = sum(entry[mode]["passed"] for entry in data["families"])
        assert passed == data["passed"][mode]
        assert passed >= 0.97 * len(families)
        assert all(entry[mode]["passed"] or entry[mode]["reason"] for entry in data["families"])
