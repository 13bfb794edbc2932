"""The learning rate of each step."""

from __future__ import annotations

from typing import Any

import pytest

from stagewright.engine.jobs.learning_rate import learning_rate
from stagewright.spec.plan import OptimizerSpec


def _rates(**options: Any) -> list[float]:
    spec = OptimizerSpec(learning_rate=8.0, **options)
    return [learning_rate(spec, step, 6) for step in range(6)]


def test_schedules() -> None:
    assert _rates() == [8.0] * 6
    assert _rates(lr_warmup_steps=2) == [4.0, 8.0, 8.0, 8.0, 8.0, 8.0]
    assert _rates(lr_warmup_steps=2, lr_schedule="linear") == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0]
    assert _rates(lr_warmup_steps=2, lr_schedule="cosine") == pytest.approx(
        [4.0, 8.0, 8.0, 4 + 8**0.5, 4.0, 4 - 8**0.5]
    )
