"""Benchmarks are scripts; their shared modules are in the same folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmark_paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import as the scripts do."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(BENCHMARKS / "jobs")
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
