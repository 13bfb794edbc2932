"""Tensor parallelism matches the single-device baseline; models it can't split are rejected with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensor_jobs
import torch
from torch import nn

from stagewright import zoo
from stagewright.engine.tensor.apply import modules_to_keep_whole, plan_tensor_parallel, require_whole_regions
from stagewright.errors import UsageError

FAMILIES = ("deit", "vit", "bert", "roberta", "gpt2", "llama")
RELATIVES = (
    "mistral",
    "qwen2",
    "qwen3",
    "opt",
    "phi",
    "gpt-neox",
    "distilbert",
    "phi3",
    "modernbert",
    "falcon-40b",
    "falcon-heads",
)


def check(result: dict[str, Any], num_layers: int = 2) -> None:
    assert result["loss"] <= 1e-5
    assert result["outputs"] <= 1e-5
    assert result["gradients"] <= 1e-5
    assert result["evaluated"] <= 1e-5
    assert result["same_state"]
    assert result["loads"]
    assert result["regions"] == 2 * num_layers
    held, planned = result["parameters"]
    assert held == planned
    # One all-reduce per region in forward, one in backward; in evaluation only the forward one.
    assert result["training_bytes"] >= result["planned_bytes"]
    assert result["evaluation_bytes"] * 2 == result["planned_bytes"]


@pytest.mark.parametrize("name", FAMILIES)
def test_parity_with_baseline(name: str, pool_of: Callable[[int], Any]) -> None:
    for result in pool_of(2).run("tensor_jobs:step", name):
        check(result)
        assert result["training_bytes"] == result["planned_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RELATIVES)
def test_parity_of_related_families(name: str, pool_of: Callable[[int], Any]) -> None:
    for result in pool_of(2).run("tensor_jobs:step", name):
        check(result)


def test_norm_over_all_heads(pool_of: Callable[[int], Any]) -> None:
    """OLMo 2 normalizes query and key over all heads: their squares are all-reduced."""
    for result in pool_of(2).run("tensor_jobs:step", "olmo2"):
        assert max(result[name] for name in ("loss", "outputs", "gradients", "evaluated")) <= 1e-5
        assert result["same_state"]
        assert result["loads"]
        assert result["regions"] == 4


def test_attention_that_reads_its_width_from_the_input_is_replicated(pool_of: Callable[[int], Any]) -> None:
    """PegasusX's encoder takes the width of all heads from the input's shape; its other layers are split."""
    model, _ = tensor_jobs.build("pegasus-x")
    plan = plan_tensor_parallel(model, 2)
    assert (
        "PegasusXGlobalLocalAttention): its code takes the total width of its heads from the input" in plan.replicated
    )
    assert "(token_hidden_states.shape[2])" in plan.replicated
    owners = [region.owner for region in plan.regions]
    assert "model.encoder.layers.0.self_attn" not in owners
    assert {"model.decoder.layers.0.self_attn", "model.decoder.layers.0.encoder_attn"} <= set(owners)
    for result in pool_of(2).run("tensor_jobs:step", "pegasus-x"):
        assert max(result[name] for name in ("loss", "outputs", "gradients", "evaluated")) <= 1e-5
        assert result["same_state"]
        assert result["loads"]


@pytest.mark.parametrize("name", ["gpt2"])
def test_four_workers(name: str, pool_of: Callable[[int], Any]) -> None:
    for result in pool_of(4).run("tensor_jobs:step", name):
        check(result)


def test_weights_match_after_several_steps(pool_of: Callable[[int], Any]) -> None:
    assert max(pool_of(2).run("tensor_jobs:trained", "gpt2", 4)) <= 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_dropout_matches_baseline(name: str, attention: str, pool_of: Callable[[int], Any]) -> None:
    for result in pool_of(2).run("tensor_jobs:dropout", name, attention):
        assert result["gradients"] <= 1e-5
        assert result["drawn"] == 0, "the random state advances as in the baseline"
        assert result["evaluated"] <= 1e-5


def test_activation_checkpointing_draws_the_same_masks(pool_of: Callable[[int], Any]) -> None:
    assert max(pool_of(2).run("tensor_jobs:recomputed", "bert")) <= 1e-6


def test_bfloat16(pool_of: Callable[[int], Any]) -> None:
    assert max(pool_of(2).run("tensor_jobs:half", "llama")) <= 0.05  # 8 bits of mantissa


@pytest.mark.parametrize("shard", [False, True], ids=["tensor", "fsdp"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "deit"])
def test_captured_stage(name: str, shard: bool, pool_of: Callable[[int], Any]) -> None:
    for result in pool_of(2).run("tensor_jobs:stage", name, shard):
        assert result["outputs"] <= 1e-5
        assert result["gradients"] <= 1e-5


def test_rejects_units_that_divide_a_region() -> None:
    model, _ = tensor_jobs.build("bert")
    plan = plan_tensor_parallel(model, 2)
    require_whole_regions(plan, ["bert.encoder.layer.0", "bert.encoder.layer.1"])
    halves = [
        f"bert.encoder.layer.{index}.{part}" for index in range(2) for part in ("attention", "intermediate", "output")
    ]
    with pytest.raises(UsageError, match=r"layer.0.intermediate.dense … .*, but they are in 2 units") as caught:
        require_whole_regions(plan, halves)
    blocks = "bert.encoder.layer.0,bert.encoder.layer.1"
    assert str(caught.value).endswith(f"keep each whole with --units {blocks}")
    require_whole_regions(plan, blocks.split(","))
    assert modules_to_keep_whole(plan, halves) == blocks.split(",")
    assert modules_to_keep_whole(plan, blocks.split(",")) == []


def test_plan_names_layers() -> None:
    model, _ = tensor_jobs.build("llama")
    plan = plan_tensor_parallel(model, 2)
    assert [layer for region in plan.regions for layer in region.layers()][:7] == [
        ("model.layers.0.self_attn.q_proj", "column"),
        ("model.layers.0.self_attn.k_proj", "column"),
        ("model.layers.0.self_attn.v_proj", "column"),
        ("model.layers.0.self_attn.o_proj", "row"),
        ("model.layers.0.mlp.gate_proj", "column"),
        ("model.layers.0.mlp.up_proj", "column"),
        ("model.layers.0.mlp.down_proj", "row"),
    ]
    # 2 layers: q, o 32×32; k, v 16×32; three of 32×64.
    split = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert tensor_jobs.parameters_per_worker(model, plan) == total - split // 2
    # Per token and region: 32 features in forward, 32 in backward.
    assert tensor_jobs.planned_bytes(model, plan, 10) == 10 * 4 * 4 * 64


@pytest.mark.parametrize("name", ["digits-vit", "deit-tiny", "bert-minilm", "gpt-layers:2", "llama-tiny"])
def test_splits_zoo_models(name: str) -> None:
    module = zoo.load(name, batch=2).module
    workers = 3 if name == "deit-tiny" else 2
    plan = plan_tensor_parallel(module, workers)
    assert len(plan.regions) == 2 * {"digits-vit": 4, "deit-tiny": 12, "bert-minilm": 6, "gpt-layers:2": 2}.get(name, 8)


def test_rejects_indivisible_heads() -> None:
    with pytest.raises(UsageError, match=r"tensor=2 does not divide the 3 attention heads of .* use data or pipeline"):
        plan_tensor_parallel(zoo.load("deit-tiny", batch=2).module, 2)
    model, _ = tensor_jobs.build("llama")
    with pytest.raises(
        UsageError,
        match=r"tensor=4 does not divide the 2 key/value heads of model.layers.0.self_attn in LlamaForCausalLM; "
        "use tensor=2 with data=2 or pipeline=2",
    ):
        plan_tensor_parallel(model, 4)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bloom", "packs query, key and value in an unknown order"),
        ("falcon-7b", "all 4 query heads use one key/value head, which tensor parallelism can't split"),
        ("falcon-alibi", "its mask has the position biases (ALiBi) of all heads"),
    ],
)
def test_replicates_attention_with_unknown_packing(name: str, reason: str) -> None:
    model, _ = tensor_jobs.build(name.replace("alibi", "heads"))
    model.config.alibi = name.endswith("alibi")
    plan = plan_tensor_parallel(model, 2)
    assert reason in plan.replicated
    assert "instead" not in plan.replicated
    assert all("mlp" in region.owner for region in plan.regions)
    assert len(plan.regions) == model.config.num_hidden_layers


def test_replicates_attention_with_unknown_parameters_and_sizes() -> None:
    model, _ = tensor_jobs.build("llama")
    attention: Any = model.model.layers[1].self_attn
    attention.sinks = nn.Parameter(torch.zeros(4))
    plan = plan_tensor_parallel(model, 2)
    assert plan.replicated.startswith("model.layers.1.self_attn (LlamaAttention): 'sinks' is among")
    owners = [region.owner for region in plan.regions]
    assert "model.layers.0.self_attn" in owners
    assert "model.layers.1.self_attn" not in owners
    assert "model.layers.1.mlp" in owners

    class ReadsWidth(type(attention)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(-1, self.width)

    del attention.sinks
    attention.__class__, attention.width = ReadsWidth, 32
    assert "its code reads width = 32, which may be the size of all heads" in plan_tensor_parallel(model, 2).replicated


def test_replicates_gated_layers_and_tied_weights_and_rejects_attention_outputs() -> None:
    model, _ = tensor_jobs.build("deit")
    mlp: Any = model.deit.layers[0].mlp
    mlp.fc1 = nn.Linear(32, 128)
    plan = plan_tensor_parallel(model, 2)
    assert "fc1 have 128 output features but fc2 has 64 input" in plan.replicated
    assert "deit.layers.0.mlp" not in [region.owner for region in plan.regions]
    model, _ = tensor_jobs.build("llama")
    layers: Any = model.model.layers
    layers[0].mlp.up_proj.weight = layers[1].mlp.up_proj.weight
    plan = plan_tensor_parallel(model, 2)
    assert "is tied to" in plan.replicated
    assert not {"model.layers.0.mlp", "model.layers.1.mlp"} & {region.owner for region in plan.regions}
    model, _ = tensor_jobs.build("bert")
    model.config._attn_implementation = "eager"
    model.config.output_attentions = True
    with pytest.raises(UsageError, match="set output_attentions=False"):
        plan_tensor_parallel(model, 2)
