"""What a backward in two halves costs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from made_profiles import equal_units
from stagewright.planner.costs import split_backward
from stagewright.planner.costs.measure import measure_model
from stagewright.planner.costs.split_backward import SplitBackwardCost, _factors, measure_split_backward
from stagewright.spec.plan import Mesh, ModelSpec, Plan

PERCEPTRON = Plan(model=ModelSpec(name="mlp-mnist"), batch=8)


def test_each_half_against_its_part_of_the_whole() -> None:
    """The profile says 2 + 1 s; a whole backward takes 6 s now, on a machine half as fast."""
    assert _factors([(6.0, 4.0, 2.0)], 2.0, 1.0) == (1.0, 1.0), "halving costs nothing"
    assert _factors([(6.0, 5.0, 3.0)], 2.0, 1.0) == (1.25, 1.5)
    rounds = [(6.0, 9.0, 3.0), (12.0, 5.0, 3.0), (6.0, 5.0, 9.0)]
    assert _factors(rounds, 2.0, 1.0) == (1.25, 1.5), "what disturbs one of a round spoils nothing"


def test_only_where_a_schedule_splits(tmp_path: Path) -> None:
    whole = measure_model(PERCEPTRON, cache=tmp_path, repeats=1).overheads
    assert (whole.split_input, whole.split_weight) == (1.0, 1.0)
    split = Plan(model=PERCEPTRON.model, batch=8, mesh=Mesh(pipeline=2), microbatches=2, schedule="zbv")
    for found in (measure_model(split, cache=tmp_path, repeats=2), measure_model(PERCEPTRON, size=4, repeats=2)):
        overheads = found.overheads
        assert overheads.split_input > 0
        assert overheads.split_weight > 0
        assert overheads.split_input != pytest.approx(1.0, abs=1e-9), "it was measured"


def test_no_room_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = equal_units(3)

    def fails(error: Exception) -> None:
        monkeypatch.setattr(split_backward, "_round", lambda graph, model: (_ for _ in ()).throw(error))

    fails(RuntimeError("can't be split"))
    assert measure_split_backward(None, None, profile, 1) == SplitBackwardCost()  # type: ignore[arg-type]
    fails(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0"))
    with pytest.raises(torch.OutOfMemoryError):
        measure_split_backward(None, None, profile, 1)  # type: ignore[arg-type]
