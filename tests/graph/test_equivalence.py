"""Capture compares graph and model up to the noise of the model's own kernels, and no further."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stagewright.graph.equivalence import find_difference


class _NoisyLinear(torch.autograd.Function):
    """A product whose weight gradient has noise, like a kernel that adds in no fixed order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, noise: float, generator: torch.Generator) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.noise, ctx.generator = noise, generator
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        exact = x.T @ gradients[0]
        noise = 2 * torch.rand(exact.shape, generator=ctx.generator) - 1
        return gradients[0] @ weight.T, exact + ctx.noise * noise * exact.abs().max(), None, None


class Noisy(nn.Module):
    """A layer with noise in its weight gradient."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.noise, self.generator = noise, torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> Any:
        return _NoisyLinear.apply(x, self.weight, self.noise, self.generator)  # type: ignore[no-untyped-call]


X = torch.linspace(-1, 1, 32).view(4, 8)


@pytest.mark.parametrize("noise", [0.0, 1e-3, 1e-2])
def test_noise_of_the_model_is_allowed(noise: float) -> None:
    model = Noisy(noise)
    assert find_difference(model, lambda x: model(x), (X,), {}, with_gradients=True) is None


@pytest.mark.parametrize("noise", [0.0, 1e-3, 1e-2])
@pytest.mark.parametrize("factor", [0.0, 0.8, 1.2])
def test_wrong_gradient_is_found_in_noise(noise: float, factor: float) -> None:
    model = Noisy(noise)

    def run(x: torch.Tensor) -> Any:
        output = model(x)
        return output.detach() + factor * (output - output.detach())

    assert "gradient of weight" in str(find_difference(model, run, (X,), {}, with_gradients=True))


def test_equal_runs_need_equal_bits() -> None:
    model = Noisy(0.0)
    difference = find_difference(model, lambda x: model(x) * (1 + 1e-6), (X,), {})
    assert difference is not None
    assert difference.startswith("result 0 is off by")


def test_models_with_random_results_are_not_compared() -> None:
    class Random(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(x.shape, generator=generator)

    generator = torch.Generator().manual_seed(2)
    model = Random()
    assert find_difference(model, lambda x: model(x) + 1, (X,), {}) is None


@pytest.mark.parametrize("wrong_runs", [1, 2])
def test_one_other_run_of_the_graph_is_noise(wrong_runs: int) -> None:
    model, runs = Noisy(1e-6), []

    def run(x: torch.Tensor) -> Any:
        runs.append(x)
        return model(x) * (1.01 if len(runs) <= wrong_runs else 1.0)

    difference = find_difference(model, run, (X,), {}, with_gradients=True)
    assert (difference is None) == (wrong_runs == 1)
