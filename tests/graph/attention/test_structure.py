"""Which modules of a unit are attention, and which of their layers are linear."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stagewright.graph.attention.structure import find_attentions, linear_layers, other_layers


def module_of(name: str) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    if name == "bert":
        return hf.BertModel(hf.BertConfig(vocab_size=8, **sizes))
    if name == "qwen3":
        return hf.Qwen3Model(hf.Qwen3Config(vocab_size=8, num_key_value_heads=1, head_dim=8, **sizes))
    if name == "t5":
        return hf.T5Model(hf.T5Config(vocab_size=8, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2))
    if name == "resnet":
        return hf.ResNetModel(hf.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]))
    return hf.MambaModel(hf.MambaConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1, state_size=4))


@pytest.mark.parametrize(
    ("name", "classes", "linear", "others"),
    [
        ("bert", ["BertSelfAttention"] * 2, ["query", "key", "value"], []),
        ("qwen3", ["Qwen3Attention"] * 2, ["q_proj", "k_proj", "v_proj", "o_proj"], ["q_norm", "k_norm"]),
        ("t5", ["T5Attention"] * 3, ["q", "k", "v", "o"], ["relative_attention_bias"]),
    ],
)
def test_attentions(name: str, classes: list[str], linear: list[str], others: list[str]) -> None:
    found = find_attentions(module_of(name))
    assert [type(attention).__name__ for attention in found] == classes
    names = {module: path for path, module in found[0].named_modules()}
    assert [names[layer] for layer in linear_layers(found[0])] == linear
    assert [names[layer] for layer in other_layers(found[0])] == others


@pytest.mark.parametrize("name", ["resnet", "mamba"])
def test_models_without(name: str) -> None:
    assert find_attentions(module_of(name)) == []


def test_multihead_attention_itself() -> None:
    attention = nn.MultiheadAttention(8, 2)
    assert find_attentions(attention) == [attention]
