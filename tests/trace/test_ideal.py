"""Ideal systems of steps made by hand: none can be beaten."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import pipeline_run, row, write_run
from stagewright.errors import RunError
from stagewright.trace.ideal import IdealStep, check_ideal, ideal_step
from stagewright.trace.read import read_trace


def test_a_pipeline(tmp_path: Path) -> None:
    """Each worker computes 6.5 s; with free links the last ends at 9.5 s; a unit of 40 % of 13 s takes 5.2 s."""
    trace = read_trace(pipeline_run(tmp_path))
    found = ideal_step(trace, 0, batch=8, largest_unit=0.4)
    assert (found.step_s, found.free_s, found.balanced_s) == (12.0, 9.5, 6.5)
    assert found.endless_s == pytest.approx(5.2)
    large = ideal_step(trace, 0, batch=8, largest_unit=0.6)
    assert large.balanced_s == large.endless_s == pytest.approx(7.8), "a unit can't be split"


def test_data_and_tensor(tmp_path: Path) -> None:
    def rows(busy_s: float) -> list[dict[str, object]]:
        return [
            row("step", 0, 10),
            row("backward", 0, busy_s, stage=0, microbatch=0),
            row("collective", busy_s, 8, note="data"),
            row("optimizer", 8, 9),
        ]

    data = ideal_step(read_trace(write_run(tmp_path / "d", "data=2", [rows(6), rows(4)])), 0, batch=8)
    assert (data.free_s, data.balanced_s) == (7.0, 6.0)
    assert data.endless_s == pytest.approx(1 + 5 / 4), "the optimizer step, and one sample of four"
    tensor = read_trace(write_run(tmp_path / "t", "tensor=2", [rows(6), rows(6)]))
    assert ideal_step(tensor, 0, batch=8, baseline_s=11.0).endless_s == pytest.approx(3.0), "2 × 7 − 11 is repeated"
    assert ideal_step(tensor, 0, batch=8, baseline_s=20.0).endless_s == 0, "nothing is repeated"


def test_a_step_faster_than_its_ideal_is_a_defect() -> None:
    with pytest.raises(RunError, match=r"defect: run-7 took 1 s, less than its ideal of 1\.52 s"):
        check_ideal(IdealStep(step_s=1.0, free_s=1.52, balanced_s=1.0, endless_s=0.5), "run-7")
