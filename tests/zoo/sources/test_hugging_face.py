from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from stagewright import zoo
from stagewright.errors import DataMissing, UsageError
from stagewright.zoo.sources import network


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    zoo.load("digits-vit", seed=5).module.save_pretrained(tmp_path)  # type: ignore[operator]
    return tmp_path


def test_a_local_folder(folder: Path) -> None:
    named, found = zoo.load("digits-vit", seed=5, batch=2), zoo.load(f"hf:{folder}", batch=2)
    assert found.num_classes == 10
    assert found.args[0].shape == (2, 1, 8, 8)
    found.module.eval()
    named.module.eval()
    assert torch.equal(found.module(*named.args).logits, named.module(*named.args).logits)


def test_random_weights_need_the_configuration_alone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataMissing, match="weights='random'"):
        zoo.load(f"hf:{folder}")
    model = zoo.load(f"hf:{folder}", weights="random", num_classes=4, image_size=12)
    assert model.num_classes == 4
    assert model.module(*model.args).logits.shape == (4, 4)
    assert model.args[0].shape == (4, 1, 12, 12)


def test_a_decoder_and_a_bare_encoder(tmp_path: Path) -> None:
    small = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaConfig(**small, intermediate_size=16, architectures=["LlamaForCausalLM"]).save_pretrained(
        tmp_path / "llama"
    )
    model = zoo.load(f"hf:{tmp_path}/llama", weights="random", sequence_length=5)
    assert model.objective == "next-token"
    assert not model.module.config.use_cache  # type: ignore[union-attr]
    assert model.loss(model.module(*model.args), model.target).item() == pytest.approx(4.6, abs=0.3)
    transformers.BertConfig(**small, intermediate_size=16).save_pretrained(tmp_path / "bert")
    bare = zoo.load(f"hf:{tmp_path}/bert", weights="random", sequence_length=5)
    assert type(bare.module).__name__ == "BertModel"
    assert bare.objective == "none"
    assert bare.loss(bare.module(*bare.args), bare.target).shape == ()
    judge = zoo.load(f"hf:{tmp_path}/bert", weights="random", num_classes=3, sequence_length=5)
    assert judge.module(*judge.args).logits.shape == (4, 3)


def test_what_has_no_example(tmp_path: Path) -> None:
    transformers.Wav2Vec2Config(architectures=["Wav2Vec2Model"]).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="takes 'input_values', for which no example batch"):
        zoo.load(f"hf:{tmp_path}", weights="random")


def test_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(network, "offline", lambda: True)
    with pytest.raises(DataMissing) as caught:
        zoo.load("hf:nobody-at-all/nothing-there")
    assert str(caught.value) == (
        "the model 'hf:nobody-at-all/nothing-there' is not on this machine and the Hugging Face hub can't be "
        "reached; download it on a machine with network access and give its folder: hf:/path/to/folder"
    )


def test_wrong_references(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'hf:' needs a model"):
        zoo.load("hf:")
    with pytest.raises(DataMissing, match="does not exist"):
        zoo.load("hf:/no/such/folder")
    with pytest.raises(DataMissing, match=r"has no config\.json"):
        zoo.load(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "never-heard-of"}))
    with pytest.raises(UsageError, match=r"config\.json .* can't be used: .*never-heard-of"):
        zoo.load(f"hf:{tmp_path}")
