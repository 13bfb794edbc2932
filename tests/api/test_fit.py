"""What a result of ``sw.fit`` says."""

from __future__ import annotations

from stagewright.api.fit import FitResult
from stagewright.planner.fit import StrategyFit


def test_a_refusal_is_told_once() -> None:
    """With and without activation checkpointing the reason is the same."""
    numbers = {"largest": 0, "peak_bytes": 0, "above_bytes": 0, "now_bytes": 0, "now": 8}
    rows = tuple(
        StrategyFit(strategy="tensor", recompute=recompute, refused="3 heads can't be split over 2", **numbers)
        for recompute in (False, True)
    )
    result = FitResult(model="m", what="batch", devices=2, memory_bytes=1, rows=rows)
    assert result.notes == ["tensor: 3 heads can't be split over 2"]
