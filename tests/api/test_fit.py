"""What a result of ``sw.fit`` says."""

from __future__ import annotations

import pytest

import stagewright as sw
from stagewright.api.fit import FitResult
from stagewright.errors import UsageError
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


def test_a_cluster_states_memory_and_devices() -> None:
    named, stated = (
        sw.fit("llama-2-7b", analytic=True, precision="bf16", batch=8, **options)
        for options in ({"cluster": "8xa100"}, {"memory": "80GiB", "devices": 8})
    )
    assert named == stated
    assert any(row.largest for row in named.rows)
    with pytest.raises(UsageError, match="how much memory has a device"):
        sw.fit("llama-2-7b", analytic=True)
    with pytest.raises(UsageError, match="add --analytic"):
        sw.fit("mlp-mnist", cluster="8xa100")
    with pytest.raises(UsageError, match="--devices 9: the cluster has 8"):
        sw.fit("llama-2-7b", analytic=True, cluster="8xa100", devices=9)
