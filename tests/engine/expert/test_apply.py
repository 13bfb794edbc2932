"""Expert parallelism equals the single-device baseline: loss, gradients, buffers, optimizer step, training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity_jobs import assert_parity

MODELS = ["mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss", "switch"]
ROW_BYTES = 16 * 4
"""Bytes of one token's hidden states."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_the_baseline(pool_of: Any, name: str) -> None:
    """With dropout, an auxiliary loss where the model has one, and unequal micro-batches."""
    results = pool_of(2).run("expert_jobs:parity", name, "expert=2", batch=7, microbatches=2)
    assert_parity(results)
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
    assert_parity(pool_of(4).run("expert_jobs:parity", name, mesh, **options))


@pytest.mark.slow
def test_bytes_of_rows_and_of_gradients(pool_of: Any) -> None:
    """Each row is exchanged twice in forward and twice in backward; no expert is all-reduced."""
    results = pool_of(2).run("expert_jobs:parity", "mixtral", "expert=2", batch=8)
    rows = 8 * 6 * 2 * 3  # samples, tokens, chosen experts, layers
    assert sum(result["row_bytes"] for result in results) == 4 * rows * ROW_BYTES
    total, experts = results[0]["num_parameters"], results[0]["expert_parameters"]
    assert experts == 3 * 4 * 3 * 16 * 16 / 2
    flags = 8 * 100
    assert 4 * (total - 2 * experts) <= results[0]["data_bytes"] <= 4 * (total - 2 * experts) + flags


@pytest.mark.slow
def test_training_with_partial_batches_and_checkpoints_of_other_plans(pool_of: Any, tmp_path: Path) -> None:
    """A batch of one sample leaves a replica without one; the second half resumes on the other number of workers."""
    (whole,) = pool_of(1).run("expert_jobs:training", "mixtral", "serial", sizes=(8, 5, 1, 8), microbatches=2)
    path = str(tmp_path / "checkpoint")
    first = pool_of(2).run("expert_jobs:training", "mixtral", "expert=2", sizes=(8, 5, 1), save=path)
    (second,) = pool_of(1).run("expert_jobs:training", "mixtral", "serial", sizes=(8,), load=path, microbatches=2)
    for result in first:
        np.testing.assert_allclose(result["losses"], whole["losses"][:3], rtol=1e-5)
        np.testing.assert_allclose(result["evaluations"], whole["evaluations"][:3], rtol=1e-5)
    np.testing.assert_allclose(second["losses"], whole["losses"][3:], rtol=1e-5)
    for name, value in whole["state"].items():
        np.testing.assert_allclose(second["state"][name], value, rtol=1e-4, atol=1e-5, err_msg=name)


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
