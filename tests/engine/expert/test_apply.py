"""Expert parallelism equals the single-device baseline: loss, gradients, buffers, optimizer step, training runs."""

from __future__ import annotations

from typing import Any

import pytest

MODELS = ["mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss", "switch"]


def check(results: list[dict[str, Any]]) -> None:
    for result in results:
        report = result["report"]
        assert report.equal, report
        assert max(report.loss, report.gradients, report.buffers, report.outputs, report.updates) <= 1e-5, report


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_the_baseline(pool_of: Any, name: str) -> None:
    """With dropout, an auxiliary loss where the model has one, and unequal micro-batches."""
    results = pool_of(2).run("expert_jobs:parity", name, "expert=2", batch=7, microbatches=2)
    check(results)
    assert results[0]["expert_parameters"] == results[1]["expert_parameters"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("mixtral", "data=4,expert=2", {"batch": 9, "microbatches": 2, "clip": 0.1}),
        ("qwen3-moe", "expert=4", {"batch": 9, "recompute": "always"}),
        ("mixtral", "expert=2,pipeline=2", {"microbatches": 2}),
        ("switch", "expert=4", {"training": False}),
        ("qwen3-moe", "expert=2,pipeline=2", {"training": False, "microbatches": 2}),
    ],
)
def test_four_workers_equal_the_baseline(pool_of: Any, name: str, mesh: str, options: dict[str, Any]) -> None:
    check(pool_of(4).run("expert_jobs:parity", name, mesh, **options))


@pytest.mark.parametrize(
    ("name", "num_workers", "options", "words"),
    [
        ("mixtral", 3, {}, ["expert=3", "4 experts", "model.layers.0.mlp.experts", "expert=2"]),
        ("qwen3-moe", 5, {"num_experts": 7}, ["7 experts", "use data or pipeline"]),
        ("llama4", 2, {}, ["experts (Llama4TextExperts)", "takes hidden_states, not"]),
        ("jetmoe", 2, {}, ["input_linear (JetMoeParallelExperts)", "takes inputs, expert_size, not"]),
        ("llama", 2, {}, ["LlamaForCausalLM has none"]),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(
    name: str, num_workers: int, options: dict[str, Any], words: list[str]
) -> None:
    from expert_jobs import refusal

    sentence = refusal(name, num_workers, **options)
    assert all(word in sentence for word in words), sentence
