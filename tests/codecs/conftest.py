"""Pools of workers for codecs on links: those of the engine's tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "engine" / "support"):  # workers import `pool` and `codec_jobs` by name
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(scope="session")
def pool_of() -> Iterator[Callable[[int], Any]]:
    """``pool_of(n)``: n workers; one pool at a time is alive."""
    from pool import Pool

    alive: dict[int, Any] = {}

    def get(num_workers: int) -> Any:
        pool = alive.get(num_workers)
        if pool is None or not all(process.is_alive() for process in pool.processes):
            for other in list(alive):
                alive.pop(other).close()
            alive[num_workers] = Pool(num_workers)
        return alive[num_workers]

    yield get
    for pool in alive.values():
        pool.close()
