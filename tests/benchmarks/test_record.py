from __future__ import annotations

import importlib
import os

import pytest


def test_records_without_cpu_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no CPU affinity."""
    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    record = importlib.import_module("record")
    assert record.machine_text().startswith(f"{os.cpu_count()} cores of ")


def test_command_leaves_out_the_output_file() -> None:
    record = importlib.import_module("record")
    words = ["/there/benchmarks/codec_cpu.py", "--output=a.json", "--plain", "-o", "b.json", "--model", "a b"]
    assert record.command_of(words) == "python benchmarks/codec_cpu.py --plain --model 'a b'"
