"""What a configuration says of a model is what the model has when it is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stagewright.analytic.block import Operator, Operators
from stagewright.analytic.hardware.devices import accelerators
from stagewright.analytic.hardware.kernels import Kernels
from stagewright.analytic.layout import Layout
from stagewright.analytic.models import load_shape
from stagewright.analytic.shape import TransformerShape
from stagewright.errors import UsageError
from stagewright.planner.costs.measure import measure_model
from stagewright.profiler.profile import Profile
from stagewright.spec.plan import Mesh, ModelSpec, Plan

SIZES = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4}
TOKENS = {"vocab_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {**SIZES, **TOKENS, "max_position_embeddings": 16}
GROUPED = {**TEXT, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {**TOKENS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 16},
    "llama": GROUPED,
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 16},
    "gemma": {**GROUPED, "head_dim": 16},
    "gemma2": {**GROUPED, "head_dim": 16},
    "phi3": GROUPED,
    "opt": {**TEXT, "ffn_dim": 88, "word_embed_proj_dim": 32},
    "gpt_neox": TEXT,
    "gemma3_text": {**GROUPED, "head_dim": 16},
    "gpt_neo": {**TOKENS, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    "bloom": {**TOKENS, "hidden_size": 32, "n_layer": 3, "n_head": 4},
    "starcoder2": GROUPED,
}
# Models whose configurations have other names, or experts in some layers only.
OTHERS: dict[str, dict[str, Any]] = {
    "falcon": {**TOKENS, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_hidden_size": 88},
    "mpt": {**TOKENS, "d_model": 32, "n_heads": 4, "n_layers": 3},
    "bitnet": GROUPED,
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "llama4_text": {
        **GROUPED,
        "num_hidden_layers": 5,
        "head_dim": 8,
        "intermediate_size_mlp": 64,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
    },
    "qwen3_moe": {
        **GROUPED,
        "num_hidden_layers": 5,
        "head_dim": 8,
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 2,
    },
    "ernie4_5_moe": {
        **GROUPED,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "head_dim": 8,
    },
}
EXACT = {"gpt2": 0.0, "opt": 0.0, "gpt_neo": 0.0}


def built(family: str, folder: Path) -> tuple[Any, TransformerShape]:
    """The model, and its shape as read from a file."""
    import transformers

    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    config.use_cache = False
    # As most files on a hub have it: what is the family's default is left out.
    saved = {name: value for name, value in config.to_dict().items() if name != "tie_word_embeddings"}
    (folder / "config.json").write_text(json.dumps(saved, default=str))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval(), load_shape(f"hf:{folder}", 8)


def matrices(model: Any) -> int:
    """Parameters of all matrices, tied ones once; without tables of positions, norms and biases."""
    return sum(
        one.numel()
        for name, one in model.named_parameters()
        if one.ndim == 2 and not ("wpe" in name or "position" in name)
    )


def counted_macs(model: Any, samples: int, length: int) -> int:
    ids = torch.zeros(samples, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids)
    return int(counter.get_total_flops()) // 2


def operators(shape: TransformerShape, device: str = "A100", **options: Any) -> Operators:
    layout = Layout(stack="stagewright", divided_vocabulary=False, **options)
    kernels = Kernels(device=accelerators()[device], precision=layout.precision, fused_attention=False)
    return Operators(shape=shape, layout=layout, kernels=kernels)


def macs(part: tuple[Operator, ...]) -> float:
    return sum(operator.flops for operator in part) / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_macs(family: str, tmp_path: Path) -> None:
    model, shape = built(family, tmp_path)
    assert shape.parameters == matrices(model)
    builder = operators(shape, microbatch=2)
    found = shape.num_layers * macs(builder.block(experts=False)) + macs(builder.head())
    # Rotary embeddings multiply a few numbers beside.
    assert found == pytest.approx(counted_macs(model, 2, 8), rel=EXACT.get(family, 0.01))


@pytest.mark.parametrize("family", OTHERS)
def test_parameters_of_other_configurations(family: str) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(family, **OTHERS[family])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    found = TransformerShape.from_config(config.to_dict(), family).parameters
    built_size = sum(one.numel() for one in model.parameters() if one.ndim > 1)
    assert found == pytest.approx(built_size, rel=0.003), "biases of Ernie's router aside"


def test_dbrx() -> None:
    """As its publisher states it: 132 billion parameters, of which a token visits 36."""
    experts = {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}
    config = {
        "model_type": "dbrx",
        "d_model": 6144,
        "n_heads": 48,
        "n_layers": 40,
        "max_seq_len": 32768,
        "vocab_size": 100352,
        "attn_config": {"kv_n_heads": 8},
        "ffn_config": experts,
        "tie_word_embeddings": False,
    }
    shape = TransformerShape.from_config(config, "dbrx")
    assert shape.parameters == pytest.approx(132e9, rel=0.005)
    assert shape.active_parameters == pytest.approx(36e9, rel=0.02)
    assert shape.sequence_length == 32768


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "is an encoder-decoder"),
        ({"model_type": "jamba", "mamba_d_state": 16}, "state-space or recurrent layers"),
        ({"model_type": "recurrent_gemma", "lru_width": 32}, "state-space or recurrent layers"),
        ({"model_type": "longcat_flash", "zero_expert_num": 256}, "experts that compute nothing"),
    ],
)
def test_other_models_are_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TransformerShape.from_config({**GROUPED, **more}, "config.json")


def test_layers_that_are_shared() -> None:
    shape = TransformerShape(
        num_layers=3, width=32, num_heads=4, num_key_heads=2, feed_forward=88, num_matrices=3, vocabulary=48,
        sequence_length=8, tied=False,
    )  # fmt: skip
    whole, half = (operators(shape, microbatch=2, tensor=size).block(experts=False) for size in (1, 2))
    assert macs(whole) == 2 * macs(half)
    hidden = 2 * 8 * 32 * 2
    undivided = 2 * saved(half) - saved(whole)
    assert undivided == 4 * hidden, "the inputs of two norms and of two layers"


def saved(part: tuple[Operator, ...]) -> float:
    return sum(operator.saved_bytes for operator in part)


def test_what_a_tensor_axis_leaves_whole_is_what_is_measured(tmp_path: Path) -> None:
    """Of the hidden state's size: inputs of two norms and of two layers, and two of dropout, which a CPU keeps as wide
    as what they mask; the formula counts its masks at a byte."""
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **FAMILIES["gpt2"], "n_layer": 2}))
    spec = ModelSpec(name=f"hf:{tmp_path}", sequence_length=8, weights="random")
    measured = measure_model(Plan(model=spec, batch=2, mesh=Mesh(tensor=2)), size=2, cache=False, repeats=1)
    assert measured.whole is not None
    shape = load_shape(spec.name, 8)
    whole, half = (
        operators(shape, microbatch=2, tensor=size, precision="float32").block(experts=False) for size in (1, 2)
    )
    found = [2 * kept_by_block(measured.profile) - kept_by_block(measured.whole), 2 * saved(half) - saved(whole)]
    hidden = 2 * 8 * 32 * 4
    assert [part / hidden for part in found] == [pytest.approx(6, abs=0.15), 4.5]


def kept_by_block(profile: Profile) -> int:
    return next(one.saved_bytes.total for one in profile.units if one.block is not None)


def test_times_go_with_device_and_samples() -> None:
    shape = TransformerShape(
        num_layers=2, width=4096, num_heads=32, num_key_heads=32, feed_forward=16384, num_matrices=2, vocabulary=1000,
        sequence_length=2048, tied=True,
    )  # fmt: skip

    def block(name: str, **options: Any) -> tuple[float, float, float]:
        part = operators(shape, name, microbatch=4, **options).block(experts=False)
        return sum(one.forward_s for one in part), sum(one.backward_s for one in part), macs(part)

    slow, fast = block("A100"), block("H100")
    # Not faster than the peak, and not slower than half of what large products sustain.
    for (forward, backward, count), name in ((slow, "A100"), (fast, "H100")):
        least = 2 * count / accelerators()[name].flops_16
        assert least < forward < 2 * least / accelerators()[name].matmul_share
        assert 1.8 < backward / forward < 2.6
    assert 1.8 < slow[0] / fast[0] < 3.2
    assert block("A100", precision="float32")[0] > 8 * slow[0], "not at the 16-bit peak"


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown model 'gpt2'.*folder with a config\.json"):
        load_shape("gpt2")
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(UsageError, match=r"config.json is not JSON"):
        load_shape(f"hf:{tmp_path}")
    file.write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(UsageError, match="has none of num_attention_heads, n_head, num_heads"):
        load_shape(f"hf:{tmp_path}")


def test_the_length(tmp_path: Path) -> None:
    """As asked, else the longest that the configuration names."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **FAMILIES["gpt2"]}))
    assert load_shape(f"hf:{tmp_path}").sequence_length == 16
    assert load_shape(f"hf:{tmp_path}/config.json", 5).sequence_length == 5
