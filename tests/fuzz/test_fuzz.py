"""Files, bytes and requests that others wrote end in a clear error, quickly and in little memory.

python -m pytest tests/fuzz -m long         10,000 cases a target
python benchmarks/damaged_input.py           the same, with a table
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fuzz.read_variants import ALL_TARGETS, Outcome, fuzz

CASES, LONG_CASES = 300, 10_000
LIMIT_S, LIMIT_BYTES = 3.0, 200 * 2**20


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: a disk may wait each time a file is replaced."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="stagewright-fuzz-", dir=memory) as name:
        yield Path(name)


def check(outcome: Outcome) -> None:
    assert not outcome.wrong, "\n".join(f"{where}: {case}" for where, case in list(outcome.wrong.items())[:10])
    assert outcome.slowest_s < LIMIT_S
    assert outcome.grown_bytes < LIMIT_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("make", ALL_TARGETS, ids=lambda make: make.__name__)
def test_damaged_input(make: Callable[..., object], folder: Path) -> None:
    check(fuzz(make, folder, CASES, whole=False))


@pytest.mark.long
@pytest.mark.parametrize("make", ALL_TARGETS, ids=lambda make: make.__name__)
def test_damaged_input_at_length(make: Callable[..., object], folder: Path) -> None:
    check(fuzz(make, folder, LONG_CASES, whole=True))
