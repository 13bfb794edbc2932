"""Context parallelism equals the single-device baseline, with ring and with all-to-all attention."""

from __future__ import annotations

from typing import Any

import pytest
from parity_jobs import assert_parity

from stagewright.engine.context.axis import zigzag
from stagewright.errors import UsageError


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama", {"context_attention": "all-to-all"}),
        ("gpt2", {"microbatches": 2}),
        ("gpt2", {"context_attention": "all-to-all", "recompute": "always"}),
        ("bert", {}),
        ("bert", {"context_attention": "all-to-all", "training": False}),
    ],
)
def test_two_workers_equal_the_baseline(pool_of: Any, name: str, options: dict[str, Any]) -> None:
    """With dropout in attention and hidden states, padding masks, grouped queries, RoPE and shifted labels."""
    assert_parity(pool_of(2).run("context_jobs:parity", name, "context=2", **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("llama", "context=4", {}),
        ("llama", "context=4", {"context_attention": "all-to-all"}),
        ("gpt2", "context=2,pipeline=2", {"microbatches": 2}),
        ("gpt2", "data=2,context=2", {"clip": 0.1}),
        ("bert", "context=4", {"training": False}),
    ],
)
def test_four_workers_equal_the_baseline(pool_of: Any, name: str, mesh: str, options: dict[str, Any]) -> None:
    assert_parity(pool_of(4).run("context_jobs:parity", name, mesh, **options))


@pytest.mark.slow
def test_bytes_of_the_ring(pool_of: Any) -> None:
    """Keys and values go to every other worker; activations are gathered once for each block."""
    results = pool_of(2).run("context_jobs:parity", "llama", "context=2", training=False)
    tokens, width, blocks = 4 * 16, 16, 2
    keys = 2 * (tokens // 2) * width  # keys and values of half of the tokens; with a mask, heads are repeated
    assert [result["bytes"] for result in results] == [blocks * 4 * (keys + tokens * width)] * 2


def test_zigzag_gives_every_worker_as_many_keys_under_a_causal_mask() -> None:
    for num_workers in (1, 2, 4):
        held = zigzag(16, num_workers)
        assert sorted(sum(held, ())) == list(range(16))
        assert len({sum(position + 1 for position in positions) for positions in held}) == 1
    with pytest.raises(UsageError, match="context=4 divides sequences into 8 equal chunks, not 12 tokens"):
        zigzag(12, 4)


@pytest.mark.parametrize(("name", "words"), [("t5", "trained bias"), ("mlp", "has none")])
def test_what_cannot_be_divided_is_refused(name: str, words: str) -> None:
    from context_jobs import refusal

    assert words in refusal(name)
