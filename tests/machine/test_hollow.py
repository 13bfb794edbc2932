"""Hollow models take no memory, run, and skip the products with their weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stagewright.graph.capture import capture
from stagewright.machine.cpu_offload import offloaded, resident
from stagewright.machine.hollow import copy_hollow, is_hollow, is_hollow_model, make_hollow, parameters_on_meta

CPU = torch.device("cpu")
WIDTH = 40_000  # a weight of 6 GiB


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.table.sum())


def test_a_model_larger_than_memory_is_captured() -> None:
    with parameters_on_meta():
        model = make_hollow(Wide(), dtype=torch.bfloat16, device=CPU)
    assert model.first.weight is model.second.weight
    assert model.first.weight.shape == (WIDTH, WIDTH)
    assert model.first.weight.dtype == torch.bfloat16
    assert sum(parameter.untyped_storage().nbytes() for parameter in model.parameters()) == 3 * 2
    assert model.table.tolist() == [0.0, 1.0, 2.0]
    x = torch.randn(2, WIDTH, dtype=torch.bfloat16)
    graph = capture(model, (x,))
    assert [call.name for call in graph.calls] == ["first", "second"]
    assert [tuple(value.shape) for value in graph.cuts[0].crossing] == [(2, WIDTH)]
    with offloaded(model, CPU):
        assert model(x).shape == (2, WIDTH)


def test_products_are_skipped_only_with_hollow_factors() -> None:
    model = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    expected = model(x)
    with offloaded(model, CPU):
        assert torch.equal(model(x), expected)
    make_hollow(model)
    assert is_hollow_model(model)
    with offloaded(model, CPU):
        assert torch.equal(model(x), torch.zeros(2, 3))
    assert not is_hollow(torch.zeros(1))


def test_a_unit_has_real_weights_while_it_is_timed() -> None:
    model = make_hollow(nn.Linear(4, 3))
    with resident(model, CPU):
        assert not is_hollow(model.weight)
        assert model.weight.shape == (3, 4)
    assert is_hollow(model.weight)


def test_registering_is_restored() -> None:
    with parameters_on_meta():
        assert nn.Linear(2, 2).weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.logit_scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.logit_scale.exp()


def test_a_scalar_parameter_stays_a_scalar() -> None:
    copied = copy_hollow(Scaled())
    assert copied is not None
    assert copied.logit_scale.shape == ()
    assert copied(torch.ones(2, 4)).shape == (2, 4)


def test_experts_of_a_hollow_model_are_skipped() -> None:
    """Kernels of grouped products refuse weights without strides."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    hollow = copy_hollow(model)
    assert hollow is not None
    ids = torch.zeros((2, 8), dtype=torch.long)
    with offloaded(hollow, CPU):
        graph = capture(hollow, (), {"input_ids": ids, "labels": ids})
        assert graph(input_ids=ids, labels=ids).logits.shape == (2, 8, 64)
    expected = capture(model, (), {"input_ids": ids, "labels": ids})
    assert [call.name for call in graph.calls] == [call.name for call in expected.calls]
