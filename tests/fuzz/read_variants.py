"""Read damaged variants of a target's samples, and note what went wrong, how long it took and how much memory."""

from __future__ import annotations

import contextlib
import random
import resource
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fuzz.mutate import mutate
from fuzz.socket_targets import live_page, wire
from fuzz.targets import TARGETS, Target
from stagewright.errors import RunError, StagewrightError

ALL_TARGETS: tuple[Callable[..., object], ...] = (*TARGETS, wire, live_page)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What reading the variants of one target showed."""

    name: str
    num_cases: int
    num_wrong: int
    """Cases that ended in something other than success or a clear error."""
    wrong: dict[str, str]
    """The first such case, by exception and place."""
    slowest_s: float
    """CPU time of the slowest case."""
    grown_bytes: int
    """Growth of the process's peak memory over all cases."""
    total_s: float


def fuzz(make: Callable[..., object], folder: Path, num_cases: int, *, whole: bool) -> Outcome:
    """Fuzz a target; slow ones get fewer cases, with ``whole`` only the report."""
    if make is live_page:
        with live_page(folder) as target:
            return read_variants(target, num_cases)
    target = make(folder)  # type: ignore[assignment]
    share = max(target.share * 5, 0.2) if whole else target.share
    return read_variants(target, round(num_cases * min(1.0, share)))


def read_variants(target: Target, num_cases: int) -> Outcome:
    """Read damaged variants; a case is named by its target and number, and is the same everywhere."""
    for content, _, read in target.samples:
        with contextlib.suppress(RunError):  # the connection ends after its messages
            read(content)
    wrong: dict[str, str] = {}
    num_wrong = 0
    begun_s, slowest_s = time.perf_counter(), 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(num_cases):
        chance = random.Random(f"{target.name} {number}")
        content, is_text, read = target.samples[number % len(target.samples)]
        variant = mutate(content, chance, text=is_text)
        case_s = time.process_time()
        try:
            read(variant)
        except StagewrightError:
            pass
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"
            wrong.setdefault(where, f"case {number}: {str(error)[:100]}")
            num_wrong += 1
        slowest_s = max(slowest_s, time.process_time() - case_s)
    return Outcome(
        name=target.name,
        num_cases=num_cases,
        num_wrong=num_wrong,
        wrong=wrong,
        slowest_s=slowest_s,
        grown_bytes=1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
        total_s=time.perf_counter() - begun_s,
    )
