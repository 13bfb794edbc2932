"""Divided sequences equal the single-device baseline, send what theory says, and are refused where they can't be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sequence_jobs
import torch
from parity_jobs import assert_parity
from torch import nn

from stagewright.engine.tensor.apply import plan_tensor_parallel
from stagewright.engine.tensor.axis import TensorAxis
from stagewright.engine.tensor.sequence import DividedBlock
from stagewright.engine.tensor.sequence_plan import SequencePlan, plan_sequence_parallel
from stagewright.errors import UsageError
from stagewright.graph.capture import capture

HIDDEN = 4 * 8 * 16 * 4  # bytes of the hidden states of llama, gpt2 and bert


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"microbatches": 2}),
        ("vit", {}),  # 17 tokens: 9 and 8
        ("llama", {}),
        ("bert", {}),
        ("t5", {}),
        ("llama", {"training": False}),
        ("gpt2", {"training": False}),
        ("bert", {"training": False}),
        ("vit", {"training": False}),
        ("t5", {"training": False}),
        ("gpt2", {"recompute": "always", "vocab_parallel": True, "microbatches": 2}),
        ("bert", {"compile": "units"}),
    ],
)
def test_two_workers_equal_the_baseline(name: str, options: dict[str, Any], pool_of: Callable[[int], Any]) -> None:
    """With dropout before and after every divided layer, and the masks of the baseline."""
    assert_parity(pool_of(2).run("sequence_jobs:parity", name, "tensor=2", **options))


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("gpt2", "tensor=2,pipeline=2", {"microbatches": 2}),
        ("llama", "tensor=2,pipeline=2", {"microbatches": 2, "training": False, "vocab_parallel": True}),
        ("bert", "tensor=2,pipeline=2", {"microbatches": 2}),
        ("vit", "tensor=2,pipeline=2", {"microbatches": 2}),
        ("t5", "tensor=2,pipeline=2", {"microbatches": 2}),
        ("gpt2", "tensor=2,pipeline=2", {"microbatches": 4, "schedule": "zbv"}),
        ("llama", "data=2,tensor=2", {"clip": 0.1}),
        ("gpt2", "data=2,tensor=2", {"shard": True}),
        ("bert", "data=2,tensor=2", {"zero": 2, "microbatches": 2}),
        ("llama-mha", "tensor=4", {}),
        ("vit", "tensor=4", {"microbatches": 2}),  # 17 tokens: 5, 4, 4 and 4
        ("bert", "tensor=4", {"recompute": "always"}),
        ("t5", "tensor=4", {"training": False}),
    ],
)
def test_four_workers_equal_the_baseline(
    name: str, mesh: str, options: dict[str, Any], pool_of: Callable[[int], Any]
) -> None:
    assert_parity(pool_of(4).run("sequence_jobs:parity", name, mesh, **options))


def test_bytes_are_those_of_tensor_parallelism(pool_of: Callable[[int], Any]) -> None:
    """An all-gather and a reduce-scatter for each all-reduce, at the ends of the blocks one each, and the norms."""
    results = [
        pool_of(2).run("sequence_jobs:parity", "llama", "tensor=2", sequence_parallel=divided)[0]
        for divided in (True, False)
    ]
    divided, whole = (result["bytes"] for result in results)
    assert whole == 2 * 2 * 2 * HIDDEN, "all-reduces of two regions in two blocks, in forward and backward"
    assert results[0]["partial"] == 2 * 2 * 16 * 4
    # An all-reduce sends its bytes twice over a ring, the other two once.
    assert divided == 2 * whole + 2 * HIDDEN + results[0]["partial"]


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_checkpoints_resume_with_and_without(
    before: bool, after: bool, pool_of: Callable[[int], Any], tmp_path: Any
) -> None:
    assert max(pool_of(2).run("sequence_jobs:resumed", str(tmp_path), before, after)) <= 1e-5


def plan_of(name: str, cuts: tuple[int, ...] = ()) -> SequencePlan:
    model = sequence_jobs.make_model(name)
    graph = capture(model.module, model.args, model.kwargs, "auto")
    regions = plan_tensor_parallel(model.module, 2).regions
    return plan_sequence_parallel(model.module, regions, graph.stages(cuts), 2)


@pytest.mark.parametrize(
    ("name", "blocks", "partial"),
    [
        ("llama", ["model.layers.0", "model.layers.1"], {"input_layernorm.weight", "post_attention_layernorm.weight"}),
        (
            "gpt2",
            ["transformer.h.0", "transformer.h.1"],
            {"ln_1.weight", "ln_1.bias", "attn.c_proj.bias", "ln_2.weight", "ln_2.bias", "mlp.c_proj.bias"},
        ),
    ],
)
def test_finds_blocks_and_partial_gradients(name: str, blocks: list[str], partial: set[str]) -> None:
    """Consecutive blocks pass shards on; norms and biases after a reduce-scatter have gradients of some tokens."""
    found = plan_of(name)
    assert [block.name for block in found.blocks] == blocks
    assert [(block.receives_shard, block.returns_shard) for block in found.blocks] == [(False, True), (True, False)]
    assert {block.length for block in found.blocks} == {8}
    assert found.partial == {f"{block}.{parameter}" for block in blocks for parameter in partial}
    assert not found.whole


def test_stages_join_what_crosses_their_cuts() -> None:
    """After the first of two blocks, the whole hidden states go to the next stage."""
    model = sequence_jobs.make_model("gpt2")
    graph = capture(model.module, model.args, model.kwargs, "auto")
    cut = next(call.index for call in graph.calls if call.target == "transformer.h.0")
    found = plan_of("gpt2", (cut,))
    assert not any(block.receives_shard or block.returns_shard for block in found.blocks)


def test_t5_divides_feed_forward_layers_only() -> None:
    """Its attention is not split, so it needs all tokens."""
    found = plan_of("t5")
    assert [block.name for block in found.blocks][:2] == ["encoder.block.0.layer.1", "encoder.block.1.layer.1"]
    assert not any(block.receives_shard or block.returns_shard for block in found.blocks)
    assert "attends to other tokens, but is not split" in found.whole


def test_refuses_models_without_a_block() -> None:
    """Attention and feed-forward layers alone are units, without norms beside them."""
    model = sequence_jobs.make_model("gpt2")
    for block in model.module.get_submodule("transformer.h"):
        block.ln_1, block.ln_2 = nn.Identity(), nn.Identity()
    units = [f"transformer.h.{index}.{part}" for index in range(2) for part in ("attn", "mlp")]
    graph = capture(model.module, model.args, model.kwargs, units)
    regions = plan_tensor_parallel(model.module, 2).regions
    with pytest.raises(UsageError, match=r"can't divide the sequences of GPT2LMHeadModel over tensor = 2 workers: "):
        plan_sequence_parallel(model.module, regions, graph.stages(()), 2)


class _Axis(TensorAxis):
    def __init__(self, num_workers: int) -> None:
        self.num_workers, self.index = num_workers, 1


@pytest.mark.parametrize(
    ("length", "tokens", "message"),
    [
        (8, 9, "divides sequences of 8 tokens here, or of any multiple of 2 if 8 is one, not 9 tokens"),
        (17, 16, "divides sequences of 17 tokens here, .* not 16 tokens"),
        (None, 3, "two tokens or more for each, not 3 tokens"),
    ],
)
def test_refuses_lengths(length: int | None, tokens: int, message: str) -> None:
    block = DividedBlock(_Axis(2), "h.0", length=length, returns_shard=length is not None)
    with pytest.raises(UsageError, match=message):
        block.begin(nn.Identity(), (torch.zeros(2, tokens, 4),), {})


def test_shards_of_other_lengths() -> None:
    """A later block knows the length from its shard, if all lengths are multiples of the workers."""
    block = DividedBlock(_Axis(2), "h.1", length=8, receives_shard=True, returns_shard=True)
    assert block.begin(nn.Identity(), (torch.zeros(2, 6, 4),), {}) is None
    assert block.sizes == (6, 6)
    uneven = DividedBlock(_Axis(2), "h.1", length=17, receives_shard=True)
    uneven.begin(nn.Identity(), (torch.zeros(2, 8, 4),), {})
    assert uneven.sizes == (9, 8)


def test_refuses_other_trained_inputs() -> None:
    """The gradient of a conditioning vector would be that of this worker's tokens."""
    block = DividedBlock(_Axis(2), "h.0")
    condition = torch.zeros(2, 4, requires_grad=True)
    with pytest.raises(UsageError, match=r"h.0: it takes a trained tensor of shape \[2, 4\] beside its hidden states"):
        block.begin(nn.Identity(), (torch.zeros(2, 8, 4), condition), {})
