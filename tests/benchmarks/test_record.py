from __future__ import annotations

import importlib
import os

import pytest


def test_a_system_without_affinity_can_write_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has none."""
    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    record = importlib.import_module("record")
    assert record.machine_text().startswith(f"{os.cpu_count()} cores of ")


def test_where_a_record_goes_is_no_part_of_its_command() -> None:
    record = importlib.import_module("record")
    words = ["/there/benchmarks/codec_cpu.py", "--output=a.json", "--plain", "-o", "b.json", "--model", "a b"]
    assert record.command_of(words) == "python benchmarks/codec_cpu.py --plain --model 'a b'"
