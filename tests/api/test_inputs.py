"""Inputs of the verbs: devices by number (GPUs first, shared where there are too few, else cores), clusters by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stagewright.api.inputs import load_cluster, parse_devices
from stagewright.api.progress import Progress
from stagewright.errors import UsageError
from stagewright.machine import machine


class _Notes(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def _with_gpus(count: int, patch: Any) -> None:
    patch.setattr(machine, "has_gpu", lambda: count > 0)
    patch.setattr(torch.cuda, "is_available", lambda: count > 0)
    patch.setattr(torch.cuda, "device_count", lambda: count)


def test_enough_gpus_are_used_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_gpus(4, monkeypatch)
    notes = _Notes()
    assert parse_devices(2, notes) == ("cuda:0", "cuda:1")
    assert notes.lines == []


def test_too_few_gpus_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_gpus(1, monkeypatch)
    notes = _Notes()
    assert parse_devices(2, notes) == ("cuda:0", "cuda:0")
    (told,) = notes.lines
    assert told.startswith("2 devices were asked for and torch sees 1 GPU: 2 workers share cuda:0, so ")
    assert "--devices cuda:0/8,cuda:0/8 " in told


def test_a_machine_without_gpus_uses_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_gpus(0, monkeypatch)
    notes = _Notes()
    (device,) = parse_devices(1, notes)
    assert device.startswith("cpu:")
    assert notes.lines == [f"torch sees no GPU here: running on {device}"]
    assert parse_devices("cpu:0", notes) == ("cpu:0",)
    assert len(notes.lines) == 1  # named devices need no note


def test_a_cluster_of_unknown_hardware_is_no_missing_file() -> None:
    with pytest.raises(UsageError, match=r"'8xh101': the hardware 'h101' is unknown; known are .*H100"):
        load_cluster("8xh101")
    with pytest.raises(UsageError, match=r"there is no cluster file mine\.toml; `stagewright doctor -o"):
        load_cluster("mine.toml")
