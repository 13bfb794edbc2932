"""FSDP in pipelines, and in inference, equals the single-device baseline, and sends the bytes that it should."""

from __future__ import annotations

from typing import Any

import pytest


def check(results: list[dict[str, Any]]) -> None:
    for result in results:
        report = result["report"]
        assert report.equal, report
        assert max(report.loss, report.gradients, report.buffers, report.outputs, report.updates) <= 1e-5, report
        assert result["held_bytes"] < 0.6 * result["full_bytes"], "a half, and rows that replicas can't divide"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"schedule": "1f1b"}),
        ("llama", {"schedule": "gpipe", "fsdp_gather": "microbatch", "recompute": "always", "clip": 0.1}),
        ("llama", {"schedule": "interleaved-zero-bubble", "microbatches": 2, "clip": 0.1}),
        ("gpt2", {"schedule": "1f1b", "fsdp_gather": "microbatch"}),
        ("gpt2", {"schedule": "zbv", "microbatches": 4, "clip": 0.1}),
        ("gpt2", {"schedule": "interleaved", "fsdp_gather": "microbatch", "recompute": "except-last"}),
        ("vit", {"schedule": "dualpipev", "microbatches": 4}),
        ("vit", {"schedule": "1f1b", "recompute": "always", "clip": 0.1}),
        ("vit", {"schedule": "looped-bfs", "fsdp_gather": "microbatch"}),
        ("bert", {"schedule": "1f1b", "precision": "bf16-mixed"}),
        ("bert", {"training": False}),
        ("llama", {"training": False}),
        ("gpt2", {"training": False}),
        ("vit", {"training": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_parity_in_a_pipeline(pool_of: Any, name: str, options: dict[str, Any]) -> None:
    """With dropout, tied weights on two workers or on two stages of one, and padding masks."""
    check(pool_of(4).run("fsdp_jobs:parity", name, "data=2,pipeline=2", **{"microbatches": 2, **options}))


@pytest.mark.parametrize(
    ("options", "num_transfers"),
    [
        ({"fsdp_gather": "step"}, 1 + 1),  # one all-gather and one reduce-scatter per step
        ({}, 2 * 2 + 1),  # an all-gather per pass and micro-batch, one reduce-scatter per step
        ({"training": False}, 2),
    ],
    ids=["step", "microbatch", "inference"],
)
def test_bytes_without_a_pipeline(pool_of: Any, options: dict[str, Any], num_transfers: int) -> None:
    results = pool_of(2).run("fsdp_jobs:parity", "llama", "data=2", microbatches=2, **options)
    check(results)
    for result in results:
        flags = 8 * result["num_parameters"] if options.get("training", True) else 0
        assert result["bytes"] - flags == pytest.approx(num_transfers * result["full_bytes"], rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"clip": 0.1}),
        ("gpt2", {"recompute": "always", "microbatches": 2}),
        ("vit", {"fsdp_gather": "step", "microbatches": 2, "clip": 0.1}),
        ("bert", {"training": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_hsdp_equals_the_baseline(pool_of: Any, name: str, options: dict[str, Any]) -> None:
    """Two groups of two replicas."""
    results = pool_of(4).run("fsdp_jobs:parity", name, "data=4", fsdp_shards=2, **options)
    check(results)
    for result in results:
        assert result["held_bytes"] > 0.48 * result["full_bytes"], "a half, not a quarter"


@pytest.mark.slow
@pytest.mark.parametrize(("gather", "num_transfers"), [("step", 2), ("microbatch", 3 * 4)])
def test_bytes_in_a_pipeline(pool_of: Any, gather: str, num_transfers: int) -> None:
    for result in pool_of(4).run("fsdp_jobs:parity", "llama", "data=2,pipeline=2", microbatches=4, fsdp_gather=gather):
        flags = 8 * result["num_parameters"]
        assert result["bytes"] - flags == num_transfers * result["full_bytes"], "all rows can be divided by two"


def test_a_shared_weight_needs_one_gather_per_step(pool_of: Any) -> None:
    """The embedding and the head of GPT-2 are on worker 0, which is the client."""
    client, server = pool_of(4).run("fsdp_jobs:refused")[:2]
    assert 'stages 0 and 2 on one worker share transformer.wte.weight: use fsdp_gather = "step"' in client
    assert server == ""


@pytest.mark.long
@pytest.mark.parametrize("gather", ["step", "microbatch"])
def test_hsdp_in_a_pipeline(pool_of: Any, gather: str) -> None:
    """Eight workers: two stages, each with two groups of two replicas, which all-reduce once per step."""
    options = {"fsdp_shards": 2, "fsdp_gather": gather, "microbatches": 2, "clip": 0.1}
    results = pool_of(8).run("fsdp_jobs:parity", "llama", "data=4,pipeline=2", **options)
    check(results)
    for result in results:
        transfers = {"step": 2, "microbatch": 3 * 2}[gather] + 0.5
        assert result["bytes"] - 8 * result["num_parameters"] == transfers * result["full_bytes"]
