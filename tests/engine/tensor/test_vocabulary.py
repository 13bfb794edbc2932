"""A divided vocabulary equals the single-device baseline; what can't be divided stays whole, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensor_jobs
import torch
import vocabulary_jobs
from parity_jobs import assert_parity
from torch import nn

from stagewright import zoo
from stagewright.engine.tensor.apply import plan_tensor_parallel
from stagewright.engine.tensor.axis import shard_sizes
from stagewright.engine.tensor.vocabulary import find_vocabulary
from stagewright.errors import UsageError

TOKENS, WIDTH = vocabulary_jobs.BATCH * vocabulary_jobs.LENGTH, 16
BLOCKS = 2 * 2 * 2 * TOKENS * WIDTH * 4  # two all-reduces of two regions in two blocks


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("gpt2", {"microbatches": 2}),
        ("bert", {"loss": "own"}),
        ("t5", {}),
        ("gpt2", {"training": False}),
        pytest.param("llama", {"training": False}, marks=pytest.mark.slow),
        pytest.param("bert", {"training": False}, marks=pytest.mark.slow),
        pytest.param("t5", {"training": False}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"recompute": "always", "loss": "own"}, marks=pytest.mark.slow),
        pytest.param("llama", {"loss": "squares"}, marks=pytest.mark.slow),
        pytest.param("bert", {"compile": "units"}, marks=pytest.mark.slow),
    ],
)
def test_two_workers_equal_the_baseline(name: str, options: dict[str, Any], pool_of: Callable[[int], Any]) -> None:
    """With dropout, tied weights, padding and ignored tokens, and a vocabulary that 2 does not divide."""
    results = pool_of(2).run("vocabulary_jobs:parity", name, "tensor=2", **options)
    assert_parity(results)
    assert [(21, WIDTH) in result["rows"] for result in results] == [True, False]
    assert [(20, WIDTH) in result["rows"] for result in results] == [False, True]
    assert not any((41, WIDTH) in result["rows"] for result in results)


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("gpt2", "tensor=2,pipeline=2", {"microbatches": 2}),
        pytest.param("gpt2", "tensor=2,pipeline=2", {"microbatches": 4, "schedule": "zbv"}, marks=pytest.mark.slow),
        pytest.param("llama", "data=2,tensor=2", {"clip": 0.1}, marks=pytest.mark.slow),
        pytest.param("gpt2", "data=2,tensor=2", {"shard": True}, marks=pytest.mark.slow),
        pytest.param("bert", "data=2,tensor=2", {"zero": 2, "microbatches": 2}, marks=pytest.mark.slow),
        pytest.param("gpt2", "tensor=4", {}, marks=pytest.mark.slow),
    ],
)
def test_four_workers_equal_the_baseline(
    name: str, mesh: str, options: dict[str, Any], pool_of: Callable[[int], Any]
) -> None:
    assert_parity(pool_of(4).run("vocabulary_jobs:parity", name, mesh, **options))


def test_logits_are_not_gathered_for_the_loss(pool_of: Callable[[int], Any]) -> None:
    """An all-reduce for the embedding, one for the head in backward, and three numbers for each token's loss."""
    (result, _) = pool_of(2).run("vocabulary_jobs:parity", "llama", "tensor=2")
    assert result["bytes"] == BLOCKS + 2 * TOKENS * WIDTH * 4 + 3 * TOKENS * 4
    (result, _) = pool_of(2).run("vocabulary_jobs:parity", "llama", "tensor=2", loss="own", training=False)
    logits = TOKENS * vocabulary_jobs.VOCABULARY * 4
    assert result["bytes"] == BLOCKS // 2 + TOKENS * WIDTH * 4 + logits, "in inference they are the output"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum", "ignore_index": 5},
        {"reduction": "none"},
        {"label_smoothing": 0.1},
        {"weight": True},
        {"transposed": True},
        {"probabilities": True},
    ],
    ids=lambda options: " ".join(options) or "mean",
)
def test_losses(options: dict[str, Any], pool_of: Callable[[int], Any]) -> None:
    """Losses that need all logits of a token gather them; the others do not."""
    gathers = {"label_smoothing", "weight", "probabilities"} & set(options)
    for result in pool_of(2).run("vocabulary_jobs:losses", **options):
        assert result["loss"] <= 1e-6
        assert result["gradient"] <= 1e-6
        assert result["gathers"] == bool(gathers)


def test_operations_on_divided_logits(pool_of: Callable[[int], Any]) -> None:
    """Views, casts and scales keep logits divided; other operations see them whole, in values and gradients."""
    for result in pool_of(2).run("vocabulary_jobs:operations"):
        assert result.pop("errors") <= 1e-6
        divided = {name for name, is_divided in result.items() if is_divided}
        assert divided == {"shift", "cast", "scale", "cap", "bias", "select", "transpose", "reshape"}


def test_wrong_tokens_are_errors_as_on_one_device(pool_of: Callable[[int], Any]) -> None:
    for token, target, in_place in pool_of(2).run("vocabulary_jobs:errors"):
        assert token == "index out of range in self"
        assert target == "Target 41 is out of bounds."
        assert "changes its logits in place" in in_place


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_checkpoints_resume_with_and_without(
    before: bool, after: bool, pool_of: Callable[[int], Any], tmp_path: Any
) -> None:
    """A checkpoint holds whole weights and optimizer states, whatever was divided."""
    for result in pool_of(2).run("vocabulary_jobs:resumed", str(tmp_path), before, after):
        assert result["error"] <= 1e-5
        assert result["rows"] == vocabulary_jobs.VOCABULARY


def test_shards_differ_by_one_row() -> None:
    assert shard_sizes(41, 2) == (21, 20)
    assert shard_sizes(40, 4) == (10, 10, 10, 10)
    assert shard_sizes(5, 4) == (2, 1, 1, 1)


@pytest.mark.parametrize(
    ("name", "embeddings", "heads"),
    [
        ("llama", ("model.embed_tokens",), ("lm_head",)),
        ("bert", ("bert.embeddings.word_embeddings",), ("cls.predictions.decoder",)),
        ("t5", ("shared", "encoder.embed_tokens", "decoder.embed_tokens"), ("lm_head",)),
    ],
)
def test_finds_embeddings_and_heads(name: str, embeddings: tuple[str, ...], heads: tuple[str, ...]) -> None:
    found = plan_tensor_parallel(vocabulary_jobs.make_module(name), 2, vocab_parallel=True).vocabulary
    assert found is not None
    assert (found.size, found.embeddings, found.heads, found.replicated) == (41, embeddings, heads, "")


def test_models_without_a_configuration_need_a_head() -> None:
    embedding, head = nn.Embedding(12, 8), nn.Linear(8, 12)
    found = find_vocabulary(nn.ModuleList([embedding, nn.Embedding(64, 8), head]), 2)
    assert (found.size, found.embeddings, found.heads) == (12, ("0",), ("2",))
    with pytest.raises(UsageError, match="and ModuleList has none: leave it out"):
        find_vocabulary(nn.ModuleList([embedding]), 2)


def test_refuses_models_without_a_vocabulary() -> None:
    with pytest.raises(UsageError, match=r"divides the embedding and head of a vocabulary, and \w+ has none"):
        plan_tensor_parallel(zoo.load("digits-vit", batch=2).module, 2, vocab_parallel=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_norm": 1.0}, "has max_norm"),
        ({"sparse": True}, "has sparse = True"),
        ({"scale_grad_by_freq": True}, "has scale_grad_by_freq = True"),
    ],
)
def test_embeddings_that_stay_whole(change: dict[str, Any], reason: str) -> None:
    model: Any = vocabulary_jobs.make_module("llama")
    for name, value in change.items():
        setattr(model.model.embed_tokens, name, value)
    found = plan_tensor_parallel(model, 2, vocab_parallel=True)
    assert reason in found.replicated
    assert found.vocabulary is not None
    assert (found.vocabulary.embeddings, found.vocabulary.heads) == ((), ("lm_head",))
    tied: Any = vocabulary_jobs.make_module("gpt2")
    for name, value in change.items():
        setattr(tied.transformer.wte, name, value)
    with pytest.raises(UsageError, match=f"can't divide the vocabulary of GPT2LMHeadModel: .*{reason}"):
        plan_tensor_parallel(tied, 2, vocab_parallel=True)


def test_weights_used_outside_of_their_layer_stay_whole() -> None:
    """MobileBERT concatenates the head's weight with another one."""
    import transformers as hf

    config = hf.MobileBertConfig(
        vocab_size=41, num_hidden_layers=1, hidden_size=16, num_attention_heads=4, intermediate_size=24,
        embedding_size=8, intra_bottleneck_size=16,
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"MobileBertLMPredictionHead uses the weight of cls.predictions.decoder"):
        plan_tensor_parallel(hf.MobileBertForMaskedLM(config), 2, vocab_parallel=True)


def test_layers_of_regions_are_no_heads() -> None:
    """A feed-forward layer as wide as the vocabulary belongs to its region."""
    model, _ = tensor_jobs.build("llama")
    model.config.vocab_size = 64
    model.model.embed_tokens = nn.Embedding(64, 32)  # type: ignore[union-attr]
    model.lm_head = nn.Linear(32, 64, bias=False)
    found = plan_tensor_parallel(model, 2, vocab_parallel=True).vocabulary
    assert found is not None
    assert found.heads == ("lm_head",)
    assert torch.is_tensor(model.lm_head.weight)
