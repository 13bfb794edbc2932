"""What crosses a cut: the smallest values from which everything behind it follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from stagewright.graph import UnitGraph, capture
from stagewright.graph.crossing_tensors import _Flow


def shapes(graph: UnitGraph) -> list[list[tuple[tuple[int, ...], str]]]:
    return [[(value.shape, value.dtype) for value in cut.crossing] for cut in graph.cuts]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Any, mask: Any, positions: Any) -> Any:
        return self.linear(x).masked_fill(mask[:, 0, :, :1], 0.0) + positions


class Encoder(nn.Module):
    """A padding mask that is widened, position values that need no input, and a value that skips to the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList([Block(16) for _ in range(3)])
        self.head = nn.Linear(32, 2)

    def forward(self, ids: Any, mask: Any) -> Any:
        x = first = self.table(ids)
        wide = (mask[:, None, None, :] * mask[:, None, :, None]) < 0.5
        positions = torch.arange(ids.shape[1]).float().view(1, -1, 1).expand(ids.shape[0], -1, 16)
        for block in self.blocks:
            x = block(x, wide, positions)
        return self.head(torch.cat([x, first], dim=-1))


def test_masks_travel_small_positions_not_at_all_and_skips_once() -> None:
    graph = capture(Encoder(), (torch.randint(0, 50, (2, 9)), torch.ones(2, 9)))
    hidden, mask = ((2, 9, 16), "float32"), ((2, 9), "float32")
    assert [sorted(cut, reverse=True) for cut in shapes(graph)] == [
        [hidden, mask],  # behind the embedding: its result is also what skips
        [hidden, hidden, mask],
        [hidden, hidden, mask],
        [((2, 9, 32), "float32")] if len(shapes(graph)[3]) == 1 else [hidden, hidden],
    ]
    assert graph.cuts[1].num_bytes == 2 * (2 * 9 * 16 * 4) + 2 * 9 * 4


def test_expanded_values_travel_unexpanded() -> None:
    class Expands(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 1), nn.Linear(64, 2)

        def forward(self, x: Any) -> Any:
            return self.b(self.a(x).expand(-1, 64))

    assert shapes(capture(Expands(), (torch.randn(3, 4),))) == [[((3, 1), "float32")]]


def test_a_random_value_is_drawn_once_and_sent() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            noise = torch.rand_like(x[:1])
            return self.c(self.b(self.a(x) + noise) + noise)

    assert shapes(capture(Noisy(), (torch.randn(3, 4),))) == [
        [((1, 4), "float32"), ((3, 4), "float32")],
        [((3, 4), "float32")],
    ]


def test_integers_and_booleans_may_cross() -> None:
    class Routes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.table, self.c = nn.Linear(4, 8), nn.Embedding(8, 4), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            scores = self.a(x)
            best = scores.argmax(-1)
            return self.c(self.table(best)) * (scores[:, :1] > 0), best

    graph = capture(Routes(), (torch.randn(3, 4),))
    assert sorted(shapes(graph)[1]) == [((3,), "int64"), ((3, 1), "bool"), ((3, 4), "float32")]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.data())
def test_the_flow_finds_the_cheapest_cut(size: int, data: Any) -> None:
    edges = {
        (i, j): data.draw(st.integers(0, 9))
        for i in range(size)
        for j in range(size)
        if i != j and j != 0 and i != size - 1
    }
    flow = _Flow()
    flow.add(0, size - 1, 0)
    for (start, end), capacity in edges.items():
        flow.add(start, end, capacity)
    side = flow.sink_side(0, size - 1)
    assert 0 not in side

    def cost(sink_side: set[int]) -> int:
        return sum(c for (start, end), c in edges.items() if start not in sink_side and end in sink_side)

    inner = range(1, size - 1)
    every = [{size - 1, *(one for at, one in enumerate(inner) if mask >> at & 1)} for mask in range(1 << len(inner))]
    assert cost({node for node in side if isinstance(node, int)}) == min(map(cost, every))


@pytest.mark.parametrize("with_mask", [False, True])
def test_what_crosses_in_transformers(with_mask: bool) -> None:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=100
    )
    model = RobertaForSequenceClassification(config).eval()
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    graph = capture(model, (torch.randint(5, 100, (2, 8)),), {"attention_mask": mask} if with_mask else {})
    hidden = ((2, 8, 32), "float32")
    mask_as_booleans = ((2, 1, 1, 8), "bool")  # an eighth of the int64 mask that the user passed
    assert shapes(graph)[1] == ([mask_as_booleans, hidden] if with_mask else [hidden])


class WrittenMask(nn.Module):
    """A mask that glue writes slice by slice before the cut and units use after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        mask = torch.zeros(1, 6)
        mask[:, 2:4] = 2.0
        mask[:, 4:] = 3.0
        x = self.layers[1](x * mask)
        result: torch.Tensor = self.layers[2](x + mask)
        return result


def test_a_tensor_that_was_written_to_is_not_rebuilt() -> None:
    model, x = WrittenMask().eval(), torch.randn(2, 6)
    graph = capture(model, (x,))
    for cut in range(2):
        values = graph.flatten((x,), {})
        for stage in graph.stages([cut]):
            values = stage(*values)
        assert torch.equal(graph.unflatten(values), model(x))
