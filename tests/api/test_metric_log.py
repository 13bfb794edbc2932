"""Metric logs: CSV is built in; the others call the documented functions of their packages."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stagewright.api.metric_log import MetricLog
from stagewright.errors import UsageError

STEP = {"kind": "step", "step": 1, "epoch": 1, "loss": 0.5, "samples": 8, "seconds": 2.0, "memory_bytes": 7}
EPOCH = {
    "kind": "epoch",
    "step": 1,
    "epoch": 1,
    "training_loss": 0.5,
    "evaluation_loss": 0.4,
    "accuracy": 0.9,
    "samples_per_s": 4.0,
    "evaluation_s": 1.0,
}


def _write(log: MetricLog) -> None:
    for line in ({"kind": "begin", "step": 0}, {**STEP, "learning_rate": 0.1}, EPOCH):
        log.write(line)
    log.close()


def test_csv(tmp_path: Path) -> None:
    _write(MetricLog("csv", tmp_path, {}))
    step, epoch = csv.DictReader((tmp_path / "metrics.csv").read_text(encoding="utf-8").splitlines())
    assert (step["loss"], step["samples_per_s"], step["learning_rate"]) == ("0.5", "4.0", "0.1")
    assert (epoch["loss"], epoch["evaluation_loss"], epoch["metric"]) == ("", "0.4", "0.9")


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_a_missing_package_is_one_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(UsageError, match=f"--log {name} needs the package {name}: pip install {name}"):
        MetricLog(name, tmp_path, {})


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finished")
    )
    settings: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: settings.update(given) or run))
    monkeypatch.setattr("importlib.util.find_spec", lambda package: package)
    _write(MetricLog("wandb", tmp_path, {"batch": 8, "model": {"name": "gpt2"}}))
    assert settings["config"] == {"batch": 8, "model.name": "gpt2"}
    assert calls[0][0] == 1
    assert calls[0][1]["loss"] == 0.5
    assert calls[1][1]["accuracy"] == 0.9
    assert calls[2] == "finished"


def test_a_package_that_can_not_start_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--log csv can't start: .*No such file"):
        MetricLog("csv", tmp_path / "gone", {})
