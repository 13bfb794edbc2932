"""One worker of a tensor axis, alone: it holds its share, and what it would hand over is noted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stagewright.errors import UsageError
from stagewright.graph import capture
from stagewright.graph.unit_graph import UnitGraph
from stagewright.planner.costs.tensor_shard import record_traffic, shard_alone

WIDTH, LENGTH, SAMPLES, LAYERS = 32, 6, 2, 2
IDS = {"input_ids": torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH)}


def gpt() -> UnitGraph:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=WIDTH, n_layer=LAYERS, n_head=4, vocab_size=40, n_positions=8, use_cache=False, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return capture(transformers.GPT2LMHeadModel(config).train(), (), IDS)


def held(graph: UnitGraph) -> int:
    return sum(one.numel() for one in graph.model.parameters())


@pytest.mark.parametrize("workers", [2, 4])
def test_it_holds_its_share(workers: int) -> None:
    graph = gpt()
    total, split = held(graph), LAYERS * (12 * WIDTH**2 + 7 * WIDTH)
    axis = shard_alone(graph, workers)
    assert (axis.num_workers, axis.index) == (workers, 0)
    assert held(graph) == total - split + split // workers
    logits: Any = graph(**IDS)
    assert logits.logits.shape == (SAMPLES, LENGTH, 40), "what leaves a region is as wide as ever"


def test_what_it_would_hand_over() -> None:
    graph = gpt()
    axis = shard_alone(graph, 2)
    found = record_traffic(graph, axis, (), IDS)
    assert len(found) == len(graph.calls)
    once = (SAMPLES * LENGTH * WIDTH * 4,) * 2
    by_unit = {call.name: one for call, one in zip(graph.calls, found, strict=True)}
    for name, one in by_unit.items():
        wanted = once if ".h." in name else ()
        assert (one.forward_bytes, one.backward_bytes) == (wanted, wanted), name
    assert record_traffic(graph, axis, (), IDS) == found, "a second look sees the same, not twice as much"


def test_the_first_share_computes_the_first_share() -> None:
    """Worker 0's partial sums: with the other half of every split layer at 0, whole layers give the same."""
    whole, alone = gpt(), gpt()
    shard_alone(alone, 2)
    block, part = (each.model.get_submodule("transformer.h.0.mlp") for each in (whole, alone))
    with torch.no_grad():
        half = 4 * WIDTH // 2
        block.c_fc.weight[:, half:] = 0  # type: ignore[union-attr, index]
        block.c_fc.bias[half:] = 0  # type: ignore[union-attr, index]
        value = torch.randn(SAMPLES, LENGTH, WIDTH)
        assert torch.allclose(part(value), block(value), atol=1e-5)


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(UsageError, match="3"):
        shard_alone(gpt(), 3)
