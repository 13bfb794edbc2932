"""Terms that are kept beside a profile: what is taken from there, and what is measured again."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from stagewright.planner.costs.overheads_cache import CachedOverheads, OverheadsCache
from stagewright.planner.costs.split_backward import SplitBackwardCost
from stagewright.simulator.costs.overheads import ModelOverheads
from stagewright.spec.plan import ModelSpec, OptimizerSpec, Plan

measure = importlib.import_module("stagewright.planner.costs.measure")

MLP = Plan(model=ModelSpec(name="mlp-mnist"), batch=8)
KEY = dict.fromkeys(
    ("model", "mode", "inputs", "device", "threads", "training", "units", "weights", "part", "optimizer"), "a"
)


def test_saved_overheads_are_loaded(tmp_path: Path) -> None:
    cache = OverheadsCache(tmp_path)
    assert cache.load_overheads(KEY) is None
    numbers = {field.name: number + 1 for number, field in enumerate(dataclasses.fields(ModelOverheads))}
    saved = CachedOverheads(overheads=ModelOverheads.from_dict(numbers), has_split=True)
    cache.save_overheads(KEY, saved)
    assert cache.load_overheads(KEY) == saved
    assert cache.load_overheads({**KEY, "optimizer": "b"}) is None
    cache.path(KEY).write_text(cache.path(KEY).read_text().replace('"halves"', '"quarters"'))
    assert cache.load_overheads(KEY) is None


def other_loss(output: torch.Tensor, target: Any) -> torch.Tensor:
    return output.square().mean()


def test_cached_overheads_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def overheads(*args: Any) -> ModelOverheads:
        measured.append("overheads")
        return ModelOverheads(loss_forward_s=float(len(measured)))

    def halves(*args: Any) -> SplitBackwardCost:
        measured.append("halves")
        return SplitBackwardCost(inputs=2.0, weights=3.0)

    monkeypatch.setattr(measure, "measure_training_overheads", overheads)
    monkeypatch.setattr(measure, "measure_split_backward", halves)

    def found(plan: Plan = MLP, **options: Any) -> tuple[ModelOverheads, list[str]]:
        measured.clear()
        return measure.measure_model(plan, cache=tmp_path, repeats=1, **options).overheads, list(measured)

    first = ModelOverheads(loss_forward_s=1.0)
    both = dataclasses.replace(first, split_input=2.0, split_weight=3.0)
    assert found() == (first, ["overheads"])
    assert found() == (first, [])
    assert found(size=8) == (both, ["halves"]), "for plans of any schedule"
    assert found() == found(size=8) == (both, [])
    adam = dataclasses.replace(MLP, optimizer=OptimizerSpec(name="adam"))
    assert (found(adam)[1], found(adam)[1], found()[1]) == (["overheads"], [], [])
    assert found(fresh=True) == (first, ["overheads"])
    load = measure.load_captured

    def with_another_loss(*args: Any) -> Any:
        model, graph = load(*args)
        return dataclasses.replace(model, loss=other_loss), graph

    monkeypatch.setattr(measure, "load_captured", with_another_loss)
    assert (found()[1], found()[1]) == (["overheads"], [])
