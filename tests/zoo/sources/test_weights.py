from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

from stagewright import zoo
from stagewright.errors import DataMissing, UsageError
from stagewright.spec.plan import ModelSpec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    zoo.load("digits-vit", seed=5).module.save_pretrained(tmp_path)  # type: ignore[operator]
    return tmp_path


def change(folder: Path, name: str, value: torch.Tensor | None) -> None:
    """Replaces one tensor of the saved weights, or takes it out."""
    path = folder / "model.safetensors"
    state = load_file(path)
    del state[name]
    save_file(state if value is None else state | {name: value}, path, metadata={"format": "pt"})


def a_base_weight(folder: Path) -> str:
    return next(one for one in load_file(folder / "model.safetensors") if one.startswith("vit."))


def test_the_same_weights_come_back(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved, loaded = zoo.load("digits-vit", seed=5), zoo.load("digits-vit", weights=folder, seed=9)
    for name, value in saved.module.state_dict().items():
        assert torch.equal(value, loaded.module.state_dict()[name])
    assert loaded.notes == ()
    assert loaded.module.training
    assert capfd.readouterr() == ("", "")


def test_another_number_of_classes_makes_a_new_head(folder: Path) -> None:
    model = zoo.load("digits-vit", weights=folder, num_classes=3, seed=1)
    again = zoo.load("digits-vit", weights=folder, num_classes=3, seed=1)
    assert model.num_classes == 3
    assert model.notes == ("newly initialized, not in the weights: classifier.bias, classifier.weight",)
    assert torch.equal(model.module.classifier.weight, again.module.classifier.weight)  # type: ignore


def test_a_missing_tensor_is_named(folder: Path) -> None:
    name = a_base_weight(folder)
    change(folder, name, None)
    with pytest.raises(UsageError, match=f"lack 1 tensor of ViTForImageClassification: {name}"):
        zoo.load("digits-vit", weights=folder)


def test_a_mismatched_tensor_is_named(folder: Path) -> None:
    name = a_base_weight(folder)
    change(folder, name, torch.zeros(3, 5))
    with pytest.raises(UsageError, match=rf"{name} is \(3, 5\) instead of"):
        zoo.load("digits-vit", weights=folder)


def test_weights_of_another_size_or_kind(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(UsageError, match=r"'digits-vit'.*\(96,\) in the weights and \(128,\) in digits-vit"):
        zoo.load("digits-vit", weights=folder)
    with pytest.raises(UsageError, match="to a 'vit' model, but 'deit-tiny' is 'deit'"):
        zoo.load("deit-tiny", weights=folder)


def test_a_broken_file_and_a_broken_config(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x05")
    with pytest.raises(UsageError, match="can't be loaded"):
        zoo.load("digits-vit", weights=folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json .* can't be used"):
        zoo.load("digits-vit", weights=folder)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="does not exist"):
        zoo.load("digits-vit", weights=tmp_path / "nowhere")
    with pytest.raises(DataMissing, match=r"has no config\.json; it is empty"):
        zoo.load("digits-vit", weights=tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataMissing, match=r"has no \*.safetensors file; it contains config.json"):
        zoo.load("digits-vit", weights=tmp_path)


def test_a_plain_module_takes_a_state_dict(tmp_path: Path) -> None:
    state = zoo.load("mlp-mnist", seed=3).module.state_dict()
    save_file(state, tmp_path / "model.safetensors")
    loaded = zoo.load("mlp-mnist", weights=tmp_path).module.state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in state.items())
    wrong = {name: value for name, value in state.items() if name != "fc2.bias"} | {"fc9.bias": torch.ones(1)}
    save_file(wrong, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"they lack fc2.bias and contain fc9.bias, which the model does not have"):
        zoo.load("mlp-mnist", weights=tmp_path)
    save_file(state | {"fc2.bias": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"fc2.bias is \(1,\) instead of \(128,\)"):
        zoo.load("mlp-mnist", weights=tmp_path)


def test_real_pretrained_models(data_dir: Path) -> None:
    for name in ("mobilenetv2-imagenet", "minilm-l6"):
        if not (data_dir / name).is_dir():
            pytest.skip(f"no {name} in {data_dir}")
    images = zoo.load("mobilenet-v2", weights=data_dir / "mobilenetv2-imagenet", batch=1)
    assert images.num_classes == 1000
    fewer = zoo.load("mobilenet-v2", weights=data_dir / "mobilenetv2-imagenet", num_classes=10, image_size=96)
    assert "classifier.weight" in fewer.notes[0]
    assert fewer.args[0].shape == (4, 3, 96, 96)
    texts = zoo.load("bert-minilm", weights=data_dir / "minilm-l6")
    assert texts.notes == ("newly initialized, not in the weights: classifier.bias, classifier.weight",)
    assert {one.dtype for one in texts.module.parameters()} == {torch.float32}
    assert isinstance(texts.inputs, zoo.TextInput)
    assert texts.inputs.tokenizer == data_dir / "minilm-l6"


@pytest.mark.parametrize(
    ("taken", "named"),
    [
        (
            r"layers\.1\..*experts\.2\.",
            "3 tensors of MixtralForCausalLM: {1}2.w1.weight, {1}2.w2.weight, {1}2.w3.weight",
        ),
        (
            r"layers\.1\..*experts\.3\.",
            "3 tensors of MixtralForCausalLM: {1}3.w1.weight, {1}3.w2.weight, {1}3.w3.weight",
        ),
        (r"layers\.0\..*experts\.0\.w2", "1 tensor of MixtralForCausalLM: {0}0.w2.weight"),
        (r"layers\.0\..*experts\.\d\.w3", r"1 tensor of MixtralForCausalLM: model.layers.0.mlp.experts.*.w3.weight"),
    ],
    ids=["an expert", "the last expert", "one tensor", "a kind of tensors"],
)
@pytest.mark.parametrize("hollow", [False, True])
def test_the_missing_tensors_of_an_expert_are_named(tmp_path: Path, taken: str, named: str, hollow: bool) -> None:
    config = MixtralConfig(
        vocab_size=20, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=16,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    for name in load_file(tmp_path / "model.safetensors"):
        if re.search(taken, name):
            change(tmp_path, name, None)
    names = [f"model.layers.{layer}.block_sparse_moe.experts." for layer in range(2)]
    with pytest.raises(UsageError) as caught:
        ModelSpec(name=f"hf:{tmp_path}").load(batch=2, hollow=hollow)
    assert str(caught.value) == (
        f"the weights in {str(tmp_path)!r} lack {named.format(*names)}; add them to the files, or build the model "
        "without these weights (--weights random)"
    )
