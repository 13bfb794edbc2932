"""Libraries that behave differently under export behave as in an eager run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stagewright.errors import CaptureError
from stagewright.graph import capture


def test_the_private_names_that_capture_relies_on_are_there() -> None:
    """If one of these fails, torch or transformers moved: see intercept.py, symbols.py, quirks.py."""
    from transformers import masking_utils

    assert hasattr(nn.Module, "_compiled_call_impl"), "nn.Module.__call__ no longer asks for _compiled_call_impl"
    module = nn.Linear(2, 2)
    vars(module)["_compiled_call_impl"] = lambda *_: "stand-in"
    assert module(torch.ones(2)) == "stand-in"
    assert hasattr(masking_utils, "find_packed_sequence_indices")
    assert hasattr(masking_utils, "is_torchdynamo_exporting")


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=100, use_cache=False, **sizes, **options)).eval()


def test_packed_sequences_keep_their_masks() -> None:
    model = llama()
    ids = torch.randint(0, 100, (2, 8))
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4, 5]])
    graph = capture(model, (ids,), {"position_ids": packed})
    assert torch.equal(graph(ids, position_ids=packed).logits, model(ids, position_ids=packed).logits)
    plain = torch.arange(8).expand(2, -1)
    torch.testing.assert_close(graph(ids, position_ids=plain).logits, model(ids, position_ids=plain).logits)


def test_a_cache_is_rejected_with_a_fix() -> None:
    model = llama()
    model.config.use_cache = True
    with pytest.raises(CaptureError, match=r"key-value cache.*use_cache = False"):
        capture(model, (torch.randint(0, 100, (2, 8)),))


class Prefixed(nn.Module):
    """A model whose learned prefix is passed as a cache, as PEFT's prefix tuning does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.config = self.model.config
        self.prefix = nn.Parameter(torch.randn(2, 2, 1, 4, 3, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        from transformers import DynamicCache

        prefix = [tuple(pair.expand(len(ids), -1, -1, -1) for pair in layer) for layer in self.prefix]
        logits: torch.Tensor = self.model(ids, past_key_values=DynamicCache(prefix)).logits
        return logits


def test_a_prefix_passed_as_a_cache_is_rejected_with_another_fix() -> None:
    with pytest.raises(CaptureError, match=r"key-value cache.*use_cache is False already.*prompt tuning"):
        capture(Prefixed(), (torch.randint(0, 100, (2, 8)),))


def test_without_packing_attention_keeps_its_fast_causal_form() -> None:
    model = llama()
    ids = torch.randint(0, 100, (2, 8))
    graph = capture(model, (ids,))
    masks = [recorded.kwargs["attention_mask"] for recorded in graph.record((ids,)) if "layers" in recorded.call.name]
    assert masks == [None, None]


class Drops(nn.Module):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.probability = probability

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            chance = torch.rand([])
            if not (self.training and chance < self.probability):
                x = layer(x)
        return x


def test_layer_drop_at_zero_draws_the_same_numbers(same_as: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.drop = Drops(0.0), nn.Dropout(0.5)

        def forward(self, x: Any) -> Any:
            return self.drop(self.body(x))

    model = Model().train()
    same_as(model, capture(model, (torch.randn(2, 4),), units=["drop"]), (torch.randn(2, 4),))


def test_layer_drop_is_rejected() -> None:
    with pytest.raises(CaptureError, match=r"probability 0\.1.*layerdrop to 0"):
        capture(Drops(0.1).train(), (torch.randn(2, 4),))
