"""Regression tests for families of ``benchmarks/engine_families.py``, and its page against its data."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from stagewright.engine.parallel.model import capture_for
from stagewright.spec.plan import Mesh, ModelSpec, Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import engine_families
from families import FAMILIES

DATA = json.loads(engine_families.DATA.read_text(encoding="utf-8"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("beit", "zero-bubble"),
        ("ibert", "zero-bubble"),
        ("cvt", "pipeline"),
        ("led", "pipeline"),
        ("dinov2", "data"),
        ("t5", "sharded"),
        ("prophetnet", "sharded"),
        ("switch-transformers", "sharded"),
        ("bart", "tensor"),
        ("changing-buffers", "stream"),
    ],
)
def test_former_failures(name: str, plan: str) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    result = engine_families.check_plan(name, engine_families.PLANS[plan], cores)
    assert result["verdict"] == "equal", result


def test_automatic_units_keep_tensor_parallel_regions_whole() -> None:
    model = ModelSpec(name="families.factory:bart")
    plan = Plan(model=model, batch=2, mesh=Mesh(tensor=2))
    names = [call.name for call in capture_for(plan, model.load(batch=2)).calls]
    assert {"model.decoder.layers.0", "model.decoder.layers.1"} <= set(names)


def test_page_matches_data_and_all_families_pass() -> None:
    assert [entry["name"] for entry in DATA["families"]] == [family.name for family in FAMILIES]
    assert DATA["plans"] == engine_families.PLANS
    for entry in DATA["families"]:
        assert list(entry["plans"]) == list(engine_families.PLANS)
        assert {result["verdict"] for result in entry["plans"].values()} <= {"equal", "refused"}
        for result in entry["plans"].values():
            assert not result["reason"] or re.search(r"[;:] (use|keep|move|give) ", result["reason"]), (
                result
            )  # a way out
    assert engine_families.PAGE.read_text(encoding="utf-8") == engine_families.page(DATA)
