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
    from pool import pools

    with pools() as get:
        yield get
