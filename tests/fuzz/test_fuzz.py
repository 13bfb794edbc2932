"""Files, bytes and requests that others wrote end in a clear error, quickly and in little memory.

    python -m pytest tests/fuzz -m long         10,000 cases a target

A case is named by its target and number; the same number is the same case everywhere.
"""

from __future__ import annotations

import contextlib
import random
import resource
import time
import traceback
from pathlib import Path

import pytest

from fuzz import targets
from fuzz.mutate import mutate
from fuzz.targets import TARGETS, Target
from stagewright.errors import RunError, StagewrightError

CASES, LONG_CASES = 300, 10_000
LIMIT_S, LIMIT_BYTES = 3.0, 200 * 2**20


def fuzz(target: Target, num_cases: int) -> None:
    """Read damaged variants; fail with the first ten that did not end in a clear error."""
    for content, _, read in target.samples:
        with contextlib.suppress(RunError):  # the connection ends after its messages
            read(content)
    wrong: dict[str, str] = {}
    slowest_s, before = 0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(num_cases):
        chance = random.Random(f"{target.name} {number}")
        content, is_text, read = target.samples[number % len(target.samples)]
        variant = mutate(content, chance, text=is_text)
        begun_s = time.perf_counter()
        try:
            read(variant)
        except StagewrightError:
            pass
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"
            wrong.setdefault(where, f"case {number}: {str(error)[:100]}")
        slowest_s = max(slowest_s, time.perf_counter() - begun_s)
    grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert not wrong, "\n".join(f"{where}: {case}" for where, case in list(wrong.items())[:10])
    assert slowest_s < LIMIT_S
    assert grown_bytes < LIMIT_BYTES


def _fuzz(make: object, folder: Path, num_cases: int) -> None:
    if make is targets.live_page:
        with targets.live_page(folder) as target:
            fuzz(target, num_cases)
        return
    target = make(folder)  # type: ignore[operator]
    # Slow targets get fewer cases, in the long run only the report.
    share = target.share if num_cases == CASES else max(target.share * 5, 0.2)
    fuzz(target, round(num_cases * min(1.0, share)))


@pytest.mark.slow
@pytest.mark.parametrize("make", [*TARGETS, targets.live_page], ids=lambda make: make.__name__)
def test_damaged_input(make: object, tmp_path: Path) -> None:
    _fuzz(make, tmp_path, CASES)


@pytest.mark.long
@pytest.mark.parametrize("make", [*TARGETS, targets.live_page], ids=lambda make: make.__name__)
def test_damaged_input_at_length(make: object, tmp_path: Path) -> None:
    _fuzz(make, tmp_path, LONG_CASES)
