"""Latent attention (DeepSeek) and attention sinks (GPT-OSS) are split by heads, and equal the baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sequence_jobs
import torch
from parity_jobs import assert_parity
from torch import nn

from stagewright.engine.tensor.apply import plan_tensor_parallel
from stagewright.errors import UsageError
from stagewright.graph.capture import capture
from stagewright.planner.costs.tensor_shard import record_traffic, shard_alone
from stagewright.simulator.costs.tensor_traffic import stage_sequence_traffic


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deepseek-v3", {"microbatches": 2}),
        ("deepseek-v3", {"sequence_parallel": True, "microbatches": 2}),
        ("deepseek-v3", {"training": False}),
        ("deepseek-v3", {"sequence_parallel": True, "training": False}),
        ("deepseek-v3", {"sequence_parallel": True, "recompute": "always"}),
        ("closed-deepseek-v3", {"sequence_parallel": True, "microbatches": 2}),
        ("closed-deepseek-v3", {"sequence_parallel": True, "training": False}),
        ("closed-deepseek-v3", {"recompute": "attention"}),
        ("deepseek-v2", {}),
        ("deepseek-v2", {"sequence_parallel": True}),
        ("gpt-oss", {"microbatches": 2}),
        ("gpt-oss", {"sequence_parallel": True}),
        ("gpt-oss", {"training": False}),
        ("closed-gpt-oss", {"sequence_parallel": True, "training": False}),
        ("closed-gpt-oss", {"sequence_parallel": True}),
    ],
)
def test_two_workers_equal_the_baseline(name: str, options: dict[str, Any], pool_of: Callable[[int], Any]) -> None:
    """Loss, gradients and updates, with dropout of attention weights, biases, and 9 tokens."""
    results = pool_of(2).run("sequence_jobs:parity", name, "tensor=2", **{"sequence_parallel": False, **options})
    assert_parity(results)
    assert not results[0]["replicated"]


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("deepseek-v3", "tensor=2,pipeline=2", {"microbatches": 2, "sequence_parallel": True}),
        ("closed-deepseek-v3", "tensor=2,pipeline=2", {"microbatches": 2, "training": False}),
        ("deepseek-v3", "tensor=2,pipeline=2", {"microbatches": 4, "schedule": "zbv"}),
        ("deepseek-v3", "tensor=4", {"clip": 0.1}),
        ("deepseek-v3", "tensor=4", {"sequence_parallel": True, "training": False, "vocab_parallel": True}),
        ("deepseek-v3", "data=2,tensor=2", {"shard": True}),
        ("gpt-oss", "tensor=2,pipeline=2", {"microbatches": 2}),
        ("closed-gpt-oss", "tensor=2,pipeline=2", {"microbatches": 4, "schedule": "zbv", "sequence_parallel": True}),
        ("closed-gpt-oss", "tensor=4", {"sequence_parallel": True}),
        ("gpt-oss", "data=2,tensor=2", {"zero": 2, "clip": 0.1}),
    ],
)
def test_four_workers_equal_the_baseline(
    name: str, mesh: str, options: dict[str, Any], pool_of: Callable[[int], Any]
) -> None:
    assert_parity(pool_of(4).run("sequence_jobs:parity", name, mesh, **{"sequence_parallel": False, **options}))


@pytest.mark.parametrize("name", ["glm4-moe-lite", "longcat", "minicpm3", "mistral4", "flint"])
def test_related_families_equal_the_baseline(name: str, pool_of: Callable[[int], Any]) -> None:
    results = pool_of(2).run("sequence_jobs:parity", name, "tensor=2", sequence_parallel=True)
    assert_parity(results)
    assert not results[0]["replicated"]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("deepseek-v3", "tensor=2", "pipeline=2"),
        ("deepseek-v3", "data=2", "tensor=2"),
        ("gpt-oss", "pipeline=2", "tensor=2"),
        ("gpt-oss", "tensor=2", "expert=2"),
    ],
)
def test_checkpoints_resume_under_another_plan(
    name: str, before: str, after: str, pool_of: Callable[[int], Any], tmp_path: Any
) -> None:
    assert max(pool_of(2).run("sequence_jobs:resumed_elsewhere", str(tmp_path), name, before, after)) <= 1e-5


@pytest.mark.parametrize("divided", [False, True])
def test_bytes_are_those_of_the_forecast(divided: bool, pool_of: Callable[[int], Any]) -> None:
    """Latents and shared keys are all-reduced in backward, hidden states only where they leave a region."""
    result = pool_of(2).run("sequence_jobs:parity", "closed-deepseek-v3", "tensor=2", sequence_parallel=divided)[0]
    model = sequence_jobs.make_model("closed-deepseek-v3")
    graph = capture(model.module, model.args, model.kwargs, "auto")
    axis = shard_alone(graph, 2, sequence_parallel=divided)
    traffic = record_traffic(graph, axis, model.args, model.kwargs, lambda out: out["loss"])
    hidden, latents = 4 * 9 * 16 * 4, 4 * 9 * (12 + 8 + 4) * 4
    forward = [sum(unit.forward_bytes) for unit in traffic]
    backward = [sum(unit.backward_bytes) for unit in traffic]
    # The first layer has attention and a dense feed-forward layer, the second attention and a shared expert.
    if not divided:
        assert (forward, backward) == ([0, 2 * hidden, 2 * hidden, 0, 0], [0, *(2 * [latents + hidden]), 0, 0])
        assert result["bytes"] == sum(forward) + sum(backward)
        return
    of_stage = stage_sequence_traffic(traffic)
    # The shared expert is computed on whole values, as the experts beside it.
    assert (sum(forward), sum(backward)) == (hidden, 2 * latents + hidden)
    assert sum(of_stage.forward_bytes) == (2 * 2 + 2 + 1 + 1) * hidden, "attention, dense layer, mixture, last join"
    assert sum(of_stage.backward_bytes) == (2 + 2 + 1 + 1) * hidden, "no gradient of gathered hidden states"
    assert result["bytes"] == (
        sum(forward) + sum(backward) + sum(of_stage.forward_bytes) + sum(of_stage.backward_bytes) + result["partial"]
    )


def test_layers_of_latent_attention() -> None:
    region = plan_tensor_parallel(sequence_jobs.make_model("deepseek-v3").module, 2).regions[0]
    assert [(name.removeprefix("model.layers.0.self_attn."), style) for name, style in region.layers()] == [
        ("q_a_proj", "latent"),
        ("q_a_layernorm", "latent"),
        ("kv_a_layernorm", "latent"),
        ("kv_a_proj_with_mqa", "keys"),
        ("q_b_proj", "column"),
        ("kv_b_proj", "column"),
        ("o_proj", "row"),
    ]
    assert region.divisible == {"attention heads": 4}
    region = plan_tensor_parallel(sequence_jobs.make_model("gpt-oss").module, 2).regions[0]
    assert region.head_parameters == ("model.layers.0.self_attn.sinks",)


def test_replicates_what_latent_attention_does_not_have() -> None:
    """An indexer chooses keys by the queries of all its heads; other widths mean other heads."""
    plan = plan_tensor_parallel(sequence_jobs.make_model("deepseek-v3.2").module, 2)
    assert "'indexer.wq_b.weight' is among the layers to split, but how to split it is unknown" in plan.replicated
    model = sequence_jobs.make_model("deepseek-v3").module
    attention: Any = model.get_submodule("model.layers.0.self_attn")
    attention.kv_b_proj = nn.Linear(8, 60)
    plan = plan_tensor_parallel(model, 2)
    assert "kv_b_proj maps 8 features to 60, and 4 heads of latent attention need 8 and 56" in plan.replicated
    assert "model.layers.1.self_attn" in [region.owner for region in plan.regions]
    del attention.v_head_dim
    assert "it has no attribute v_head_dim" in plan_tensor_parallel(model, 2).replicated


def test_refuses_heads_that_the_workers_do_not_divide() -> None:
    with pytest.raises(UsageError, match=r"tensor=3 does not divide the 4 attention heads of model.layers.0.self_attn"):
        plan_tensor_parallel(sequence_jobs.make_model("deepseek-v3").module, 3)


def test_sinks_that_the_code_does_not_read_stay_unknown() -> None:
    model = sequence_jobs.make_model("qwen3-moe").module
    attention: Any = model.get_submodule("model.layers.0.self_attn")
    attention.sinks = nn.Parameter(torch.zeros(4))
    assert "'sinks' is among the layers to split" in plan_tensor_parallel(model, 2).replicated
