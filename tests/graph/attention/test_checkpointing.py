"""Recomputed attention: equal gradients with dropout, less saved, linear layers not repeated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from stagewright.errors import UsageError
from stagewright.graph.attention.checkpointing import checkpointed_attentions
from stagewright.graph.attention.structure import find_attentions, linear_layers

LENGTH, WIDTH = 32, 16


class CountingLinear(nn.Linear):
    """A linear layer that counts its forwards."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class SelfAttention(nn.Module):
    """Scores that autograd saves, with dropout; the output layer may be another module's."""

    def __init__(self, has_output: bool = True, low_rank: bool = False) -> None:
        super().__init__()
        self.down = CountingLinear(WIDTH, 4) if low_rank else None
        self.down_norm = nn.LayerNorm(4) if low_rank else None
        self.qkv = CountingLinear(4 if low_rank else WIDTH, 3 * WIDTH)
        self.out = CountingLinear(WIDTH, WIDTH) if has_output else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = x if self.down is None or self.down_norm is None else self.down_norm(self.down(x))
        query, key, value = self.qkv(inputs).chunk(3, -1)
        weights = functional.dropout((query @ key.transpose(-2, -1)).softmax(-1), 0.2, self.training)
        attended = weights @ value
        return (attended if self.out is None else functional.dropout(self.out(attended), 0.2, self.training)), weights


class Block(nn.Module):
    """An attention between dropouts, and a feed-forward layer."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.attention, self.norm = SelfAttention(**options), nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(functional.dropout(x, 0.1)))[0]
        return x + self.feed_forward(x)  # type: ignore[no-any-return]


def saved_and_gradients(model: nn.Module, context: Any) -> tuple[int, list[torch.Tensor]]:
    """Return the bytes that a forward saves, and all gradients."""
    storages: dict[int, Any] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    model.zero_grad()
    torch.manual_seed(3)
    with context:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.randn(4, LENGTH, WIDTH)).square().mean()
        num_bytes = sum(storage.nbytes() for storage in storages.values())
        loss.backward()
    return num_bytes, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.2, batch_first=True)


@pytest.mark.parametrize(
    "make",
    [Block, lambda: Block(has_output=False), lambda: Block(low_rank=True), encoder],
    ids=["whole", "no output layer", "low rank", "MultiheadAttention"],
)
def test_gradients_are_equal(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().train()
    before, expected = saved_and_gradients(model, nullcontext())
    after, found = saved_and_gradients(model, checkpointed_attentions([model]))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert len(found) == len(list(model.parameters()))
    scores_bytes = 4 * LENGTH * LENGTH * 4
    assert before - after > scores_bytes


def test_linear_layers_run_once() -> None:
    model = Block(low_rank=True).train()
    attention = find_attentions(model)[0]
    saved_and_gradients(model, checkpointed_attentions([model]))
    assert [layer.calls for layer in linear_layers(attention)] == [1, 1, 1]
    saved_and_gradients(model, nullcontext())
    assert [layer.calls for layer in linear_layers(attention)] == [2, 2, 2], "calls are the module's own again"


def test_where_the_core_ends_and_what_is_reused() -> None:
    model, ended, reused = Block(), [], []
    context = checkpointed_attentions([model], on_core_end=ended.append, on_reuse=reused.append)
    saved_and_gradients(model, context)
    assert ended == [model.attention]
    assert reused == [model.attention.qkv]


def test_without_gradients_nothing_is_kept() -> None:
    model = Block().eval()
    x = torch.randn(4, LENGTH, WIDTH)
    with torch.no_grad():
        expected = model.attention(x)[0]
        with checkpointed_attentions([model]):
            assert torch.equal(model.attention(x)[0], expected)


def test_an_output_that_is_changed_in_place() -> None:
    class InPlaceAttention(SelfAttention):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = self.qkv(x).mul_(2.0)
            return scores.softmax(-1)[..., :WIDTH], scores

    model = Block()
    model.attention = InPlaceAttention(has_output=False)
    with pytest.raises(UsageError, match="the output of its layer qkv is changed in place; name units in recompute"):
        saved_and_gradients(model, checkpointed_attentions([model]))


def test_a_layer_that_returns_no_tensor() -> None:
    class Pair(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
            return super().forward(x), None

    class PairAttention(SelfAttention):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            output, _ = self.pair(x)
            return output, output

    model = Block()
    model.attention = PairAttention()
    model.attention.pair = Pair(WIDTH, WIDTH)
    with pytest.raises(UsageError, match="the output of its layer pair is a tuple; name units in recompute"):
        saved_and_gradients(model, checkpointed_attentions([model]))
