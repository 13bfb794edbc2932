"""Tensor parallelism against serial, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensor_jobs
import torch
from torch import nn

from stagewright import zoo
from stagewright.engine.tensor.apply import modules_to_close, refuse_open_regions, tensor_plan
from stagewright.errors import UsageError

FAMILIES = ("deit", "vit", "bert", "roberta", "gpt2", "llama")
RELATIVES = ("mistral", "qwen2", "qwen3", "opt", "phi", "gpt-neox", "distilbert")


def check(found: dict[str, Any], num_layers: int = 2) -> None:
    assert found["loss"] <= 1e-5
    assert found["outputs"] <= 1e-5
    assert found["gradients"] <= 1e-5
    assert found["evaluated"] <= 1e-5
    assert found["same_state"]
    assert found["loads"]
    assert found["regions"] == 2 * num_layers
    held, planned = found["parameters"]
    assert held == planned
    # One all-reduce a region forward, one backward, none besides; in evaluation the forward one alone.
    assert found["training_bytes"] >= found["planned_bytes"]
    assert found["evaluation_bytes"] * 2 == found["planned_bytes"]


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_serial(name: str, pool_of: Callable[[int], Any]) -> None:
    for found in pool_of(2).run("tensor_jobs:step", name):
        check(found)
        assert found["training_bytes"] == found["planned_bytes"]
        assert found["num_collectives"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", RELATIVES)
def test_equals_serial_for_models_with_the_same_names(name: str, pool_of: Callable[[int], Any]) -> None:
    for found in pool_of(2).run("tensor_jobs:step", name):
        check(found)


@pytest.mark.parametrize("name", ["gpt2"])
def test_four_workers(name: str, pool_of: Callable[[int], Any]) -> None:
    for found in pool_of(4).run("tensor_jobs:step", name):
        check(found)


def test_training_stays_equal(pool_of: Callable[[int], Any]) -> None:
    assert max(pool_of(2).run("tensor_jobs:trained", "gpt2", 4)) <= 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_dropout_is_that_of_serial(name: str, attention: str, pool_of: Callable[[int], Any]) -> None:
    for found in pool_of(2).run("tensor_jobs:dropout", name, attention):
        assert found["gradients"] <= 1e-5
        assert found["drawn"] == 0, "the stream of random numbers goes on as serial's"
        assert found["evaluated"] <= 1e-5


def test_recomputation_draws_the_same_masks(pool_of: Callable[[int], Any]) -> None:
    assert max(pool_of(2).run("tensor_jobs:recomputed", "bert")) <= 1e-6


def test_bfloat16(pool_of: Callable[[int], Any]) -> None:
    assert max(pool_of(2).run("tensor_jobs:half", "llama")) <= 0.05  # 8 bits of mantissa


@pytest.mark.parametrize("shard", [False, True], ids=["tensor", "data-sharded"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "deit"])
def test_a_captured_stage(name: str, shard: bool, pool_of: Callable[[int], Any]) -> None:
    for found in pool_of(2).run("tensor_jobs:stage", name, shard):
        assert found["outputs"] <= 1e-5
        assert found["gradients"] <= 1e-5


def test_refuses_units_that_cut_a_region() -> None:
    model, _ = tensor_jobs.build("bert")
    plan = tensor_plan(model, 2)
    refuse_open_regions(plan, ["bert.encoder.layer.0", "bert.encoder.layer.1"])
    halves = [f"bert.encoder.layer.{at}.{part}" for at in range(2) for part in ("attention", "intermediate", "output")]
    with pytest.raises(UsageError, match=r"layer.0.intermediate.dense … .*, but they are in 2 units") as caught:
        refuse_open_regions(plan, halves)
    wanted = "bert.encoder.layer.0,bert.encoder.layer.1"
    assert str(caught.value).endswith(f"keep each whole with --units {wanted}")
    refuse_open_regions(plan, wanted.split(","))
    assert modules_to_close(plan, halves) == wanted.split(",")
    assert modules_to_close(plan, wanted.split(",")) == []


def test_plan_names_layers() -> None:
    model, _ = tensor_jobs.build("llama")
    plan = tensor_plan(model, 2)
    assert list(plan.styles.items())[:7] == [
        ("model.layers.0.self_attn.q_proj", "column"),
        ("model.layers.0.self_attn.k_proj", "column"),
        ("model.layers.0.self_attn.v_proj", "column"),
        ("model.layers.0.self_attn.o_proj", "row"),
        ("model.layers.0.mlp.gate_proj", "column"),
        ("model.layers.0.mlp.up_proj", "column"),
        ("model.layers.0.mlp.down_proj", "row"),
    ]
    # 2 layers: q, o 32×32; k, v 16×32; three of 32×64.
    assert plan.split_parameters == 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64)
    assert plan.split_parameters + plan.whole_parameters == sum(one.numel() for one in model.parameters())
    # Per token and region: 32 features forward, 32 backward.
    assert plan.payload_bytes(10, 4, training=True) == 10 * 4 * 4 * 64


@pytest.mark.parametrize("name", ["digits-vit", "deit-tiny", "bert-minilm", "gpt-layers:2", "llama-tiny"])
def test_named_models_are_served(name: str) -> None:
    module = zoo.load(name, batch=2).module
    workers = 3 if name == "deit-tiny" else 2
    plan = tensor_plan(module, workers)
    assert len(plan.regions) == 2 * {"digits-vit": 4, "deit-tiny": 12, "bert-minilm": 6, "gpt-layers:2": 2}.get(name, 8)


def test_refuses_models_without_attention() -> None:
    for name, kind in (("mlp-mnist", "tensor parallelism can't split"), ("mobilenet-v2", "MobileNetV2")):
        with pytest.raises(UsageError, match=kind) as caught:
            tensor_plan(zoo.load(name, batch=2).module, 2)
        assert "no module holds query, key and value layers" in str(caught.value)
        assert str(caught.value).endswith("use data or pipeline instead")


def test_refuses_heads_that_do_not_divide() -> None:
    with pytest.raises(UsageError, match=r"tensor=2 does not divide the 3 attention heads of .* use data or pipeline"):
        tensor_plan(zoo.load("deit-tiny", batch=2).module, 2)
    model, _ = tensor_jobs.build("llama")
    with pytest.raises(
        UsageError,
        match=r"tensor=4 does not divide the 2 key/value heads of model.layers.0.self_attn in LlamaForCausalLM; "
        "use tensor=2 with data=2 or pipeline=2",
    ):
        tensor_plan(model, 4)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("bloom", "packs query, key and value in an order that is not known"), ("phi3", "packs query, key and value")],
)
def test_refuses_what_it_cannot_be_sure_of(name: str, reason: str) -> None:
    model, _ = tensor_jobs.build(name)
    with pytest.raises(UsageError, match=reason):
        tensor_plan(model, 2)


def test_refuses_strange_parameters_and_numbers_in_an_attention() -> None:
    model, _ = tensor_jobs.build("llama")
    attention: Any = model.model.layers[1].self_attn
    attention.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(UsageError, match=r"model.layers.1.self_attn \(LlamaAttention\): 'sinks' stands among"):
        tensor_plan(model, 2)

    class Reads(type(attention)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(-1, self.width)

    del attention.sinks
    attention.__class__, attention.width = Reads, 32
    with pytest.raises(UsageError, match="its code reads width = 32, which may stand for all heads"):
        tensor_plan(model, 2)


def test_refuses_gated_inner_layers_tied_weights_and_attention_outputs() -> None:
    model, _ = tensor_jobs.build("deit")
    mlp: Any = model.deit.layers[0].mlp
    mlp.fc1 = nn.Linear(32, 128)
    with pytest.raises(UsageError, match="fc1 give 128 features but fc2 takes 64"):
        tensor_plan(model, 2)
    model, _ = tensor_jobs.build("llama")
    layers: Any = model.model.layers
    layers[0].mlp.up_proj.weight = layers[1].mlp.up_proj.weight
    with pytest.raises(UsageError, match="is tied to"):
        tensor_plan(model, 2)
    model, _ = tensor_jobs.build("bert")
    model.config._attn_implementation = "eager"
    model.config.output_attentions = True
    with pytest.raises(UsageError, match="set output_attentions=False"):
        tensor_plan(model, 2)
