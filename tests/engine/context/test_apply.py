"""Context parallelism equals the single-device baseline, with ring and with all-to-all attention."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from parity_jobs import assert_parity

from stagewright.engine.context.axis import laid_out_like, zigzag
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
        ("llama", {"lengths": (15, 0)}),
        ("gpt2", {"lengths": (17, 0), "context_attention": "all-to-all"}),
        ("t5", {"lengths": (16, 17)}),
        ("t5", {"lengths": (11, 14), "context_attention": "all-to-all"}),
        ("t5", {"lengths": (11, 14), "recompute": "always"}),
        ("t5", {"lengths": (9, 12), "context_attention": "all-to-all", "training": False}),
    ],
)
def test_two_workers_equal_the_baseline(pool_of: Any, name: str, options: dict[str, Any]) -> None:
    """With dropout in attention and hidden states, padding masks, grouped queries, RoPE and shifted labels.

    T5 has trained biases and attends to its encoder, which has other lengths. On 2 workers, 16 and 17 tokens are 8 and
    8, 9 and 8: the second worker can't tell them apart.
    """
    assert_parity(pool_of(2).run("context_jobs:parity", name, "context=2", **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tagger", {}),
        ("tagger", {"training": False}),
        ("tagger", {"training": False, "context_attention": "all-to-all"}),
        ("tagger, causal", {"lengths": (15, 0), "microbatches": 2}),
        ("tagger, causal", {"context_attention": "all-to-all"}),
        ("tagger, compared mask", {}),
        ("tagger, compared mask", {"context_attention": "all-to-all", "lengths": (15, 0)}),
        ("tagger, causal padding", {}),
        ("tagger, causal padding", {"context_attention": "all-to-all", "recompute": "always"}),
        ("tagger, length first", {"context_attention": "all-to-all", "lengths": (17, 0)}),
        ("translator", {"lengths": (11, 14)}),
        ("translator", {"lengths": (16, 17), "context_attention": "all-to-all"}),
        ("translator", {"lengths": (9, 12), "training": False}),
        ("translator, compared mask", {"lengths": (11, 14)}),
        ("translator, length first", {"lengths": (9, 12), "context_attention": "all-to-all", "training": False}),
        ("blocks", {}),
        ("blocks", {"context_attention": "all-to-all", "training": False}),
        ("blocks, length first", {"lengths": (13, 0)}),
        ("blocks, length first", {"context_attention": "all-to-all"}),
        ("blocks, returned weights", {}),
        ("bare", {"lengths": (13, 0)}),
        ("bare", {"training": False}),
        ("bare, length first", {"context_attention": "all-to-all"}),
    ],
)
def test_layers_of_torch_equal_the_baseline(pool_of: Any, name: str, options: dict[str, Any]) -> None:
    """``nn.TransformerEncoderLayer``, ``nn.TransformerDecoderLayer`` and blocks with ``nn.MultiheadAttention``.

    With dropout, padding and causal masks, masks of each head, weights that are not used, and tokens in either
    dimension. The baseline's inference uses torch's fused layers.
    """
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
        ("llama", "context=4", {"lengths": (13, 0)}),
        ("t5", "context=4", {"lengths": (11, 14)}),
        ("t5", "context=4", {"lengths": (11, 14), "context_attention": "all-to-all"}),
        ("t5", "context=2,pipeline=2", {"lengths": (11, 14), "microbatches": 2}),
        ("t5", "data=2,context=2", {"lengths": (16, 17), "clip": 0.1}),
        ("tagger", "context=4", {}),
        ("tagger, causal padding", "context=2,pipeline=2", {"microbatches": 2}),
        ("tagger, compared mask", "context=2,pipeline=2", {"microbatches": 2}),
        ("translator", "context=4", {"lengths": (11, 14), "context_attention": "all-to-all"}),
        ("translator, length first", "data=2,context=2", {"lengths": (11, 14)}),
        ("blocks", "context=2,pipeline=2", {"microbatches": 2}),
        ("blocks", "data=2,context=2", {"training": False}),
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


@pytest.mark.slow
def test_bytes_of_uneven_lengths(pool_of: Any) -> None:
    """Of 17 tokens the workers have 9 and 8: all-gathers are padded to 18, keys and values are sent as they are."""
    results = pool_of(2).run("context_jobs:parity", "llama", "context=2", training=False, lengths=(17, 0))
    samples, width, blocks = 4, 16, 2
    sent = [blocks * 4 * samples * width * (2 * own + 18) for own in (9, 8)]
    assert [result["bytes"] for result in results] == sent


def test_zigzag_gives_every_worker_as_many_keys_under_a_causal_mask() -> None:
    for num_workers in (1, 2, 4):
        held = zigzag(16, num_workers)
        assert sorted(sum(held, ())) == list(range(16))
        assert len({sum(position + 1 for position in positions) for positions in held}) == 1


@given(st.integers(1, 9).flatmap(lambda workers: st.tuples(st.just(workers), st.integers(2 * workers, 100))))
def test_zigzag_of_any_length(sizes: tuple[int, int]) -> None:
    """Workers have equally many tokens but for one, and under a causal mask keys but for those of one query."""
    num_workers, length = sizes
    held = zigzag(length, num_workers)
    assert sorted(sum(held, ())) == list(range(length))
    for values in ([len(positions) for positions in held], [sum(positions) // length for positions in held]):
        assert max(values) - min(values) <= 1


def test_fewer_than_two_tokens_for_each_worker_are_refused() -> None:
    """Models of transformers drop the causal mask of a single token."""
    with pytest.raises(UsageError, match=r"of 7 tokens, fewer than two for each worker: .*, or context=3 or less"):
        zigzag(7, 4)
    with pytest.raises(UsageError, match=r"context=2 can't divide a sequence of 3 tokens.*: use longer sequences$"):
        zigzag(3, 2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("perceptron", "has none"),
        ("some tokens", "attends from 16 to 12 tokens"),
        ("windows", r"has hidden states of 16 tokens, of which attention gets queries of shape \[8, 1, 4, 4\]"),
        ("weights used", r"whose weights of shape \[2, 16, 16\] are used.*; use its output alone"),
        ("weights returned", "ring and all-to-all attention make no weights"),
        ("trained key", "with add_bias_kv=True, which adds a key that is no token; build it with add_bias_kv=False"),
        ("key of zeros", "with add_zero_attn=True, which adds a key that is no token"),
    ],
)
def test_what_cannot_be_divided_is_refused(name: str, words: str) -> None:
    from context_jobs import refusal

    assert re.search(words, refusal(name))


@pytest.mark.parametrize("batch", [4, 16])
@pytest.mark.parametrize(
    ("name", "sequence_dim", "keys", "masks"),
    [
        ("tagger", 1, (0,), (1,)),
        ("tagger, causal padding", 0, (0,), (1, 2)),
        ("blocks", 1, (0, 0), (1, 2)),
        ("blocks, length first", 0, (0, 0), (1, 2)),
        ("bare, length first", 0, (1,), (3,)),
    ],
)
def test_tokens_and_masks_are_found(
    name: str, sequence_dim: int, keys: tuple[int, ...], masks: tuple[int, ...], batch: int
) -> None:
    """With 16 samples of 16 tokens too, whose shapes do not say which dimension has tokens."""
    from context_jobs import sources

    for found in sources(name, batch=batch):
        assert (found.sequence_dim, found.keys, found.masks) == (sequence_dim, keys, masks)


def test_memory_has_the_same_order() -> None:
    """Dropout draws its masks in this order."""
    like, value = torch.randn(5, 3, 4).permute(1, 2, 0), torch.randn(3, 6, 5)
    laid_out = laid_out_like(like, value)
    assert torch.equal(laid_out, value)
    assert laid_out.stride() == (6, 1, 18)
    assert laid_out_like(value, value) is value
