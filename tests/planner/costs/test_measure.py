"""What is measured of a model beside its units, and the small sums around it."""

from __future__ import annotations

import importlib
import textwrap
from pathlib import Path

import pytest
import torch

from made_profiles import equal_units
from stagewright.errors import UsageError
from stagewright.machine import cpu_offload
from stagewright.planner.costs.measure import cut_indices, measure_model, plan_microbatch_sizes
from stagewright.planner.costs.training_overheads import _trainable_parameters
from stagewright.spec.plan import Mesh, ModelSpec, Plan

MLP = Plan(model=ModelSpec(name="mlp-mnist"), batch=8)


@pytest.mark.parametrize(
    ("batch", "data", "microbatches", "sizes"),
    [(8, 1, 1, (8,)), (8, 2, 2, (2, 2)), (10, 1, 3, (4, 3, 3)), (7, 2, 2, (2, 2)), (9, 2, 2, (3, 2))],
)
def test_the_replica_with_most(batch: int, data: int, microbatches: int, sizes: tuple[int, ...]) -> None:
    plan = Plan(model=MLP.model, batch=batch, mesh=Mesh(data=data), microbatches=microbatches)
    assert plan_microbatch_sizes(plan) == sizes


def test_places_of_cuts() -> None:
    profile = equal_units(4)
    assert cut_indices(profile, ["u0", "u2"]) == [0, 2]
    assert cut_indices(profile, []) == []
    for wrong in ("u3", "v"):
        with pytest.raises(UsageError, match=f"cuts after '{wrong}'"):
            cut_indices(profile, [wrong])
    with pytest.raises(UsageError, match=r"cuts \['u2', 'u0'\] are not in the order of the model"):
        cut_indices(profile, ["u2", "u0"])


def test_a_perceptron(tmp_path: Path) -> None:
    found = measure_model(MLP, size=4, cache=tmp_path, repeats=1)
    assert found.profile.batch_size == 4
    assert found.profile.parameters == 784 * 256 + 256 * 128 + 128 * 64 + 64 * 10 + 256 + 128 + 64 + 10
    overheads = found.overheads
    # Cross entropy keeps its log-softmax, 4 × 10 numbers, and what else a backward of it needs: the targets.
    assert 4 * 10 * 4 <= overheads.loss_kept_bytes <= 4 * 10 * 4 + 4 * 8 + 64
    for seconds in (
        overheads.loss_forward_s,
        overheads.loss_backward_s,
        overheads.optimizer_s_per_byte,
        overheads.accumulate_s_per_byte,
    ):
        assert seconds > 0
    assert (found.tensor, found.num_tensor, found.whole) == (None, 1, None)
    divided = measure_model(Plan(model=MLP.model, batch=8, mesh=Mesh(tensor=2)), cache=tmp_path, repeats=1)
    assert divided.tensor is not None  # one unit, since layers of several units are split together
    assert [traffic.forward_bytes for traffic in divided.tensor] == [(8 * 128 * 4, 8 * 10 * 4)]


def test_inference_measures_no_loss(tmp_path: Path) -> None:
    found = measure_model(Plan(model=MLP.model, batch=8, training=False), cache=tmp_path, repeats=1)
    assert not found.profile.training
    assert found.overheads.loss_forward_s == found.overheads.optimizer_s_per_byte == 0


def test_statistics_of_batch_norms(tmp_path: Path) -> None:
    """Means and variances of the norms in double precision, as replicas sum them."""
    model = ModelSpec(name="mobilenet-v2", image_size=32)
    found = measure_model(Plan(model=model, batch=2), cache=tmp_path, repeats=1)
    norms = [one for one in model.load(batch=2).module.modules() if isinstance(one, torch.nn.BatchNorm2d)]
    assert norms
    assert found.overheads.statistics_bytes == sum(2 * 8 * one.num_features for one in norms)
    assert found.overheads.statistics_s > 0
    assert measure_model(MLP, cache=tmp_path, repeats=1).overheads.statistics_bytes == 0


def test_a_model_that_does_not_fit_is_measured_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU without room: weights visit for each operation, and no more of them is there than a part."""
    plan = Plan(model=ModelSpec(name="mlp-mnist"), batch=8, devices=("cpu:0",))
    plain = measure_model(plan, cache=False, repeats=1)
    monkeypatch.setattr(cpu_offload, "is_offloaded", lambda module, place: True)
    monkeypatch.setattr(
        importlib.import_module("stagewright.profiler.measure"), "is_offloaded", lambda module, place: True
    )
    found = measure_model(plan, cache=False, repeats=1)
    assert plain.profile.has_whole
    assert not found.profile.has_whole
    kept = [(unit.name, unit.saved_bytes, unit.macs, unit.output_bytes) for unit in plain.profile.units]
    assert [(unit.name, unit.saved_bytes, unit.macs, unit.output_bytes) for unit in found.profile.units] == kept
    assert found.overheads.optimizer_s_per_byte > 0
    assert found.overheads.loss_kept_bytes == plain.overheads.loss_kept_bytes


def test_of_a_model_that_does_not_fit_some_parameters_are_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4, 400 and 40 bytes as many as have room eight times over, however large the model is; at least one."""
    monkeypatch.setattr(cpu_offload, "is_offloaded", lambda module, place: True)
    module = torch.nn.ParameterList(torch.zeros(size) for size in (1, 100, 10))

    def taken(limit_bytes: int) -> list[int]:
        return [one.numel() for one in _trainable_parameters(module, torch.device("cpu"), limit_bytes)]

    assert taken(8 * 444) == [1, 100, 10]
    assert taken(8 * 44) == [1, 10]
    assert taken(8) == [1]


def test_a_model_that_cannot_be_cut_is_measured_as_one_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        import torch
        from torch import nn

        class Branching(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(self, x):
                hidden = self.first(x)
                return self.last(hidden) if hidden.sum() > 0 else self.last(-hidden)

        def build():
            return Branching(), (torch.randn(8, 8),)
    """
    (tmp_path / "branching.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    plan = Plan(model=ModelSpec(name="branching:build"), batch=8, mesh=Mesh(data=2))
    (unit,) = measure_model(plan, cache=tmp_path, repeats=1).profile.units
    assert (unit.name, unit.parameters.total) == ("Branching", 2 * 72)
