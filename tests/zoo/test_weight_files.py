"""Weights that are read tensor by tensor, in pieces, from one file or several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from stagewright.files import stored_tensor
from stagewright.files.stored_tensor import TensorPart
from stagewright.zoo.weight_files import WeightFiles


def make() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 8))
    model.register_parameter("scale", nn.Parameter(torch.tensor(3.0)))
    return model


def save(model: nn.Module, folder: Path) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    names = sorted(state)
    save_file({name: state[name] for name in names[::2]}, folder / "a.safetensors")
    save_file({name: state[name] for name in names[1::2]}, folder / "b.safetensors")


def test_every_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    with torch.no_grad():
        model[1].running_mean.fill_(0.5)  # type: ignore[union-attr, operator]
    save(model, tmp_path)
    monkeypatch.setattr(stored_tensor, "_PIECE_BYTES", 40)  # a weight of 192 bytes is read in several pieces
    other = make()
    files = WeightFiles.find(tmp_path, other)
    assert files is not None
    for name, value in model.state_dict().items():
        target = torch.full_like(value, 7)
        files.read(name, target)
        assert torch.equal(target, value), name
    files.read_buffers(other)
    assert torch.equal(other[1].running_mean, torch.full((6,), 0.5))  # type: ignore[index]
    half = torch.empty(3, 8, dtype=torch.float64)
    files.read("0.weight", half, TensorPart(dim=0, ranges=((0, 3),)))
    assert torch.equal(half, model[0].weight[:3].double())  # type: ignore[index]


def test_tied_tensors_are_saved_once(tmp_path: Path) -> None:
    model = make()
    model[2].weight = nn.Parameter(model[0].weight.detach().T.contiguous())  # type: ignore[union-attr]
    model.add_module("again", nn.Linear(8, 6))
    model.again.weight = model[0].weight  # type: ignore[union-attr, index]
    state = {name: value.clone() for name, value in model.state_dict().items() if name != "again.weight"}
    save_file(state, tmp_path / "model.safetensors")
    files = WeightFiles.find(tmp_path, model)
    assert files is not None
    assert files.locations["again.weight"] == files.locations["0.weight"]


def test_other_names_or_shapes_are_not_read_singly(tmp_path: Path) -> None:
    model = make()
    save(model, tmp_path)
    model[0].weight = nn.Parameter(torch.zeros(6, 9))  # type: ignore[union-attr]
    assert WeightFiles.find(tmp_path, model) is None
    model = make()
    model.register_parameter("new", nn.Parameter(torch.zeros(2)))
    assert WeightFiles.find(tmp_path, model) is None
