"""Conclusions of two runs of a study, and ``benchmarks/compare_studies.py``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.studies.conftest import ENVIRONMENT
from tests.studies.fake_parts import MEMORY_OPTIONS, STAGES_OPTIONS, memory_parts, stages_parts
from tests.studies.fake_training_parts import (
    ACCURACIES,
    CODECS_OPTIONS,
    FABRIC_OPTIONS,
    RATES,
    STRATEGIES_OPTIONS,
    codecs_parts,
    fabric_parts,
    strategies_parts,
)

from stagewright.studies import Results
from stagewright.studies.memory.options import Options
from stagewright.studies.memory.study import build_study
from stagewright.studies.runner.folder import StudyFolder

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import compare_studies
from study_conclusions.conclusion import Comparison, Conclusions, compare
from study_conclusions.judged import conclude_codecs, conclude_fabric
from study_conclusions.timed import conclude_memory, conclude_stages, conclude_strategies


@pytest.mark.parametrize(
    ("first", "second", "outcome"),
    [
        ("blocks", "blocks", "same"),
        ("blocks", None, "one can't tell"),
        (None, "blocks", "one can't tell"),
        (None, None, "neither can tell"),
        ("blocks", "macs", "contradiction"),
    ],
)
def test_outcomes(first: str | None, second: str | None, outcome: str) -> None:
    assert Comparison(subject="policy", first=first, second=second).outcome == outcome


def test_what_only_one_run_says_contradicts_nothing() -> None:
    rows = {row.subject: row.outcome for row in compare({"a": "yes", "b": "no"}, {"b": "yes", "c": "no"})}
    assert rows == {"a": "one can't tell", "b": "contradiction", "c": "one can't tell"}


def stages(busy: float = 0.0, **rates: tuple[float, float]) -> Conclusions:
    parts = stages_parts(**rates) | {"calibration": {"noise": busy}}  # type: ignore[arg-type]
    return conclude_stages(Results(parts), STAGES_OPTIONS)


def test_policies_are_told_apart_only_beyond_the_noise() -> None:
    found = stages()
    assert found["inference, 2 stages: macs or blocks is faster"] == "blocks"
    assert found["inference, 2 stages: parameters or macs is faster"] is None  # they cut alike
    assert found["inference, 2 stages: a pipeline is faster than one device"] == "yes"
    assert found["inference: largest loss"] == "imbalance"
    assert found["inference, 2 stages: macs cuts after"] == "layers.6"
    assert "inference, 4 stages: macs or blocks is faster" not in found, "it was not run"
    assert stages(blocks=(32.0, 25.5))["inference, 2 stages: macs or blocks is faster"] is None
    assert stages(blocks=(20.0, 20.5))["inference, 2 stages: macs or blocks is faster"] == "macs"
    assert stages(busy=0.4)["inference: largest loss"] is None


def test_strategies() -> None:
    found = conclude_strategies(Results(strategies_parts()), STRATEGIES_OPTIONS)
    against = "CIFAR-10: pipeline, 2 workers, 4 micro-batches, against data parallel"
    assert found[f"{against}: faster"] == "data"
    assert found[f"{against}: accuracy"] is None  # both reach the same
    assert found["CIFAR-10: data, 2 workers is faster than one device"] == "yes"
    assert found["CIFAR-10: data, 4 workers is faster than one device"] is None  # forecast
    other = conclude_strategies(Results(strategies_parts({**RATES, "pipeline-2-4-even": 199.0})), STRATEGIES_OPTIONS)
    assert other[f"{against}: faster"] == "pipeline"
    worse = {"pipeline-2-4-even": (80.0, 80.2)}
    low = conclude_strategies(Results(strategies_parts(accuracy=worse)), STRATEGIES_OPTIONS)
    assert low[f"{against}: accuracy"] == "below"


def test_codecs() -> None:
    found = conclude_codecs(Results(codecs_parts()), CODECS_OPTIONS)
    assert found["CIFAR-10: sort3+1 collapses"] == "yes"
    assert found["CIFAR-10: sort3+1 and the accuracy"] == "loses"
    assert found["sort3+1: compression ratio"] == "0.125"
    nothing = conclude_codecs(Results(codecs_parts(dict.fromkeys(ACCURACIES, (11.0, 10.0)))), CODECS_OPTIONS)
    assert "CIFAR-10: sort3+1 collapses" not in nothing  # nothing was learned


def test_memory() -> None:
    found = conclude_memory(Results(memory_parts()), MEMORY_OPTIONS)
    assert found["data or pipeline is faster"] == "data"
    assert found["pipeline is faster than one device"] == "no"
    assert found["least memory"] == "tensor+recompute"
    assert found["most layers, data"] == "3"
    assert found["most layers, tensor with checkpointing"] is None  # "8 or more"
    assert found["pipeline: workers execute the same operators"] == "no"
    busy = conclude_memory(Results(memory_parts() | {"calibration": {"noise": 0.9}}), MEMORY_OPTIONS)
    assert busy["data or tensor is faster"] is None
    assert busy["activation checkpointing of data costs time"] is None


def test_fabric() -> None:
    found = conclude_fabric(Results(fabric_parts()), FABRIC_OPTIONS)
    assert found["mlp-mnist, clean network: diagnosis"] == "none"
    assert {subject for subject in found if subject.endswith("slower than on the clean network")}


def save(root: Path, parts: Mapping[str, Any], **options: Any) -> Path:
    study = build_study(Options(devices=("cpu:0", "cpu:1"), rounds=1, fits=("data", "tensor+recompute"), **options))
    assert asdict(Options(devices=("cpu:0", "cpu:1")))["model"] == "gpt-layers:6"
    folder = StudyFolder.create(root, study, command="stagewright study memory", environment=ENVIRONMENT)
    for name, data in parts.items():
        folder.save_part(name, seconds=1.0, data=data, other_cpu_s=0.0)
    return folder.path


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["compare_studies.py", *map(str, words)])
    return compare_studies.main()


def test_a_contradiction_exits_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speeds = {"serial": 10.0, "data": 17.0, "tensor": 14.0, "pipeline": 8.0}
    first, same = save(tmp_path, memory_parts(speeds)), save(tmp_path, memory_parts(speeds))
    other = save(tmp_path, memory_parts({**speeds, "data": 12.0}))
    output = tmp_path / "comparison.json"
    assert run(monkeypatch, first, same, "--output", output) == 0
    record = json.loads(output.read_text())
    assert record["study"] == "memory"
    assert "contradiction" not in record["counts"]
    assert record["other_load"] == [0.0, 0.0]
    assert run(monkeypatch, first, other) == 3
    shown = capsys.readouterr().out
    assert "contradiction     data or tensor is faster: data | tensor" in shown


def test_folders_of_different_studies_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, other = save(tmp_path, memory_parts()), save(tmp_path, memory_parts(), batch=4)
    assert run(monkeypatch, first, other) == 2
    assert "different options: batch; compare equal ones" in capsys.readouterr().err
    assert run(monkeypatch, first, tmp_path) == 2
