"""Pools of workers, started once for all tests of the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).parent / "support"
sys.path[:0] = [str(SUPPORT), str(SUPPORT / "axes")]  # workers started from here import `pool` and `jobs` by name


@pytest.fixture
def lone_group() -> Iterator[Any]:
    """The default process group, with this process as its only worker."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def pool_of() -> Iterator[Callable[[int], Any]]:
    """``pool_of(n)``: n workers; pools of 1 and 2, which most tests use, stay alive beside the last other one."""
    from pool import pools

    with pools(keep=(1, 2)) as get:
        yield get
