"""Clocks brought together: exactly on one machine, to within half a round trip over messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stagewright.engine.worker.clock import best_offset, clock_identity


def test_the_quickest_round_trip_counts() -> None:
    # Worker 0 is 5 s ahead; the slow trip was delayed on its way there.
    assert best_offset([(1.0, 6.75, 2.0), (3.0, 8.125, 3.25), (4.0, 9.4, 5.0)]) == (5.0, 0.125)


def test_one_machine_has_one_clock() -> None:
    assert clock_identity() == clock_identity()
    assert len(clock_identity()) > 8


def test_workers_of_one_machine_and_of_two(pool_of: Callable[[int], Any], tmp_path: Path) -> None:
    pool = pool_of(2)
    assert pool.run("clock_jobs:exchanged", ["here", "here"]) == [(0.0, 0.0), (0.0, 0.0)]
    (zero, (offset_s, error_s)) = pool.run("clock_jobs:exchanged", ["here", "there"])
    assert zero == (0.0, 0.0)
    assert 0 < error_s < 1
    assert abs(offset_s) <= error_s, "both read the same clock in truth"
    zero, (offset_s, error_s) = pool.run("clock_jobs:exchanged", ["here", "there"], ahead_s=1000.0)
    assert abs(offset_s + 1000) <= error_s, "worker 1's clock is 1000 s ahead of worker 0's"
    pool.run("clock_jobs:written", str(tmp_path))
    for rank in range(2):
        content = json.loads((tmp_path / str(rank) / "clock.json").read_text())
        assert set(content) == {"host", "offset_s", "error_s", "wall_s"}
        assert content["offset_s"] == content["error_s"] == 0.0
        assert content["wall_s"] > 1e9
