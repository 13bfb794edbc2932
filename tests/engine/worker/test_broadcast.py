"""Many tensors from one worker to all, in few messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(("piece_bytes", "num_messages"), [(1 << 20, 1), (4000, 3), (16, 7)])
@pytest.mark.parametrize("source", [0, 1])
def test_every_worker_gets_them(
    source: int, piece_bytes: int, num_messages: int, pool_of: Callable[[int], Any]
) -> None:
    """All in one piece; a large one alone between two pieces; nearly each alone (an empty one needs no message)."""
    assert pool_of(2).run("data_jobs:broadcast_tensors", source, piece_bytes) == [num_messages] * 2
