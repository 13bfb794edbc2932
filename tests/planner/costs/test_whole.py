"""The model in one piece, beside a plan's steps: a part of the benchmark of forecasts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from made_profiles import equal_units, make_costs
from stagewright.planner.costs.measure import ModelCosts
from stagewright.profiler.profile import Time
from stagewright.simulator.costs.overheads import ModelOverheads
from stagewright.simulator.simulate import step_seconds
from stagewright.spec.plan import Mesh, ModelSpec, Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "jobs"))

from whole_model import WholeModel, with_whole_time

MLP = ModelSpec(name="mlp-mnist")


def test_both_passes_take_time() -> None:
    forward_s, backward_s = WholeModel(Plan(model=MLP, batch=8, devices=("cpu:0",))).sample()
    assert forward_s > 0
    assert backward_s > 0
    forward_s, backward_s = WholeModel(Plan(model=MLP, batch=8, devices=("cpu:0",), training=False)).sample()
    assert forward_s > 0
    assert backward_s == 0


def test_a_part_of_shared_layers() -> None:
    """One worker's part, without its peers."""
    plan = Plan(model=ModelSpec(name="digits-vit"), batch=2, mesh=Mesh(tensor=2), devices=("cpu:0", "cpu:0"))
    whole = WholeModel(plan)
    sizes = [
        sum(one.numel() for one in model.parameters())
        for model in (whole._model.module, plan.model.load(batch=2).module)
    ]
    assert sizes[0] < sizes[1]
    assert min(whole.sample()) > 0


def test_units_are_as_fast_as_the_whole_was() -> None:
    """Two units of 1 s forward and 2 s backward, at a moment when the model took 3 s and 8 s."""
    measured = ModelCosts(profile=equal_units(2), overheads=ModelOverheads())
    profile = with_whole_time(measured, (3.0, 8.0)).profile
    assert (profile.whole_forward, profile.units) == (Time(median_s=3.0, spread_s=0.0), measured.profile.units)
    assert step_seconds(make_costs(profile, mesh=Mesh())) == pytest.approx(3.0 + 8.0)
