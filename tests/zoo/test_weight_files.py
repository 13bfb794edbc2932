"""Weights that are read tensor by tensor, in pieces, from one file or several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from stagewright.files import stored_tensor
from stagewright.files.stored_tensor import StoredExperts, TensorPart
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


def moe(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    common |= {"vocab_size": 20, "intermediate_size": 12}
    if kind == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=4, **common))  # type: ignore[no-any-return]
    config = transformers.Qwen3MoeConfig(moe_intermediate_size=12, num_experts=4, head_dim=8, **common)
    return transformers.Qwen3MoeForCausalLM(config)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_that_are_stored_one_by_one_are_joined(tmp_path: Path, kind: str) -> None:
    """As transformers joins them, whole and by any part of a dimension."""
    model = moe(kind)
    model.save_pretrained(tmp_path, max_shard_size="10kB")  # type: ignore[operator]
    loaded = type(model).from_pretrained(tmp_path)  # type: ignore[attr-defined]
    files = WeightFiles.find(tmp_path, model)
    assert files is not None
    joined = 0
    for name, value in loaded.state_dict().items():
        target = torch.full_like(value, 7)
        files.read(name, target)
        assert torch.equal(target, value), name
        if isinstance(files.locations[name], StoredExperts):
            joined += 1
            for dim, size in enumerate(value.shape):
                ranges = ((0, 1), (size // 2, size))
                part = torch.cat([value.narrow(dim, start, stop - start) for start, stop in ranges], dim)
                target = torch.full_like(part, 7)
                files.read(name, target, TensorPart(dim=dim, ranges=ranges))
                assert torch.equal(target, part), (name, dim)
    assert joined == 4, "two tensors of each layer"


def test_what_is_not_understood_is_read_whole(tmp_path: Path) -> None:
    model = moe("mixtral")
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    path = tmp_path / "model.safetensors"
    state = {name: value.clone() for name, value in load_file(path).items()}
    experts = "model.layers.0.block_sparse_moe.experts"
    for change in ({f"{experts}.2.w1.weight": None}, {f"{experts}.2.w1.weight": torch.zeros(8, 16)}):
        save_file({name: value for name, value in (state | change).items() if value is not None}, path)
        assert WeightFiles.find(tmp_path, model) is None
    save_file(state, path)
    assert WeightFiles.find(tmp_path, model) is not None
