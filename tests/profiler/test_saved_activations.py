from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stagewright.graph import capture
from stagewright.machine.hollow import make_hollow
from stagewright.profiler.profile import Amount, amount_of
from stagewright.profiler.saved_activations import measure_saved_activations


def test_linear_keeps_its_input_and_relu_its_output(chain: Callable[..., Any]) -> None:
    inputs = torch.randn(2, 8)
    graph = chain(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), example=inputs)
    saved = measure_saved_activations(graph, (inputs,), {})
    assert [call.saved_bytes for call in saved] == [
        Amount(total=2 * 8 * 4),
        Amount(total=2 * 16 * 4),
        Amount(total=2 * 16 * 4, shares=((1, 2 * 16 * 4),)),
    ]
    assert [call.needs_gradient for call in saved] == [(False,), (True,), (True,)]


def test_every_range_equals_a_direct_count(chain: Callable[..., Any]) -> None:
    inputs = torch.randn(2, 3, 8, 8)
    parts = [
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.GELU()),
        nn.Flatten(),
        nn.Linear(144, 5),
    ]
    graph = chain(*parts, example=inputs)
    amounts = [one.saved_bytes for one in measure_saved_activations(graph, (inputs,), {})]
    whole = chain(nn.Sequential(*parts), example=inputs)
    (direct,) = measure_saved_activations(whole, (inputs,), {})
    assert amount_of(amounts, 0, len(parts) - 1) == direct.saved_bytes.total
    head = chain(nn.Sequential(*parts[:4]), nn.Sequential(*parts[4:]), example=inputs)
    first, second = measure_saved_activations(head, (inputs,), {})
    assert amount_of(amounts, 0, 3) == first.saved_bytes.total
    assert amount_of(amounts, 4, 5) == second.saved_bytes.total


def test_model_is_left_as_it_was(chain: Callable[..., Any]) -> None:
    inputs = torch.randn(4, 8)
    norm = nn.BatchNorm1d(8)
    graph = chain(norm, nn.Dropout(), nn.Linear(8, 8), example=inputs)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    measure_saved_activations(graph, (inputs,), {})
    assert torch.equal(torch.rand(2), expected)
    assert int(norm.num_batches_tracked) == 0
    assert torch.equal(norm.running_mean, torch.zeros(8))
    assert not norm._forward_hooks
    assert not norm._forward_pre_hooks


class Branching(nn.Module):
    """A model with a harmless branch for single samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if hidden.shape[0] == 1:
            hidden = hidden.clone()
        return torch.as_tensor(self.last(hidden))


def test_a_batch_size_that_takes_another_branch() -> None:
    """The graph of a hollow model, which capture does not check, runs the model first to check that branch."""
    model = make_hollow(Branching())
    graph = capture(model, (torch.randn(4, 4),), units="leaf")
    assert not graph.guards_hold(1)
    assert len(measure_saved_activations(graph, (torch.randn(1, 4),), {})) == 2
