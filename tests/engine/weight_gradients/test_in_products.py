"""Weight gradients that are added up inside their product equal autograd's, in eager and compiled backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import stagewright as sw
from stagewright.engine.parallel import model_part, step_runner
from stagewright.engine.weight_gradients import in_products
from stagewright.engine.weight_gradients.in_products import accumulates_in_products, find_linears, separate_share

MICROBATCHES = 4


class Model(nn.Module):
    """Linear layers with and without bias, one called twice, one whose result is not used, and a Conv1D."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.repeated = nn.Linear(8, 8, bias=False)
        self.unused = nn.Linear(8, 8)
        self.columns = Conv1D(8, 8)  # type: ignore[no-untyped-call]
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 3)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.repeated(torch.tanh(self.repeated(self.first(value))))
        _ = self.unused(value)
        result: torch.Tensor = self.last(self.norm(self.columns(value)))
        return result


class Products:
    """Counts the products that were added in place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        add = in_products._add_product

        def counted(*values: torch.Tensor) -> None:
            self.count += 1
            add(*values)

        monkeypatch.setattr(in_products, "_add_product", counted)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    monkeypatch.setattr(in_products, "MIN_EAGER_ELEMENTS", 0)
    monkeypatch.setattr(model_part, "check_recordable", lambda *_: None)  # on a CPU, graphs run again
    return Products(monkeypatch)


def train(steps: int = 2, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a model in float64; return its losses and the last gradients."""
    torch.manual_seed(0)
    model = Model().double()
    batch = torch.randn(8, 6, dtype=torch.float64), torch.randint(3, (8,))
    plan = sw.Plan.of("small", 8, microbatches=MICROBATCHES, **options)
    trainer = sw.parallelize(model, batch, plan=plan, loss=nn.functional.cross_entropy)
    losses = [trainer.step(batch).loss for _ in range(steps)]
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-12, atol=1e-14)


def test_eager_products_from_the_second_microbatch_on(
    products: Products, monkeypatch: pytest.MonkeyPatch, lone_group: Any
) -> None:
    expected = train()
    assert products.count == 0
    monkeypatch.setattr(step_runner, "accumulates_in_products", lambda *_: True)
    assert_same(train(), expected)
    # 5 calls of trained layers; the first micro-batch creates the gradients, a repeated layer's second call adds to it.
    assert products.count == 2 * (MICROBATCHES - 1) * 5


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")  # both by dynamo
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", ["none", "units"])
def test_recorded_products(compiled: str, products: Products, monkeypatch: pytest.MonkeyPatch, lone_group: Any) -> None:
    monkeypatch.setenv("STAGEWRIGHT_COMPILE_BACKEND", "aot_eager")
    expected = train()
    assert_same(train(cuda_graphs=True, compile=compiled), expected)
    assert products.count == 2 * MICROBATCHES * 3  # the repeated layer stays as it is


def test_an_unused_layer_has_no_gradient(products: Products, lone_group: Any) -> None:
    """Weight decay must leave it alone, as with autograd."""
    decay = sw.Plan.of("small", 8).optimizer.__class__(name="sgd", learning_rate=0.1, weight_decay=0.5)
    expected = train(optimizer=decay)
    found = train(optimizer=decay, cuda_graphs=True)
    assert_same(found, expected)
    torch.manual_seed(0)
    assert torch.equal(found[1]["unused.weight"], Model().double().unused.weight)


def test_only_plain_linear_layers_are_changed() -> None:
    model = Model()
    model.first.weight.requires_grad_(False)
    nn.utils.parametrizations.weight_norm(model.last)
    assert find_linears(model) == [model.repeated, model.unused, model.columns]
    assert find_linears(model, min_elements=65) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"microbatches": 2}, True),
        ({}, False),
        ({"microbatches": 2, "training": False}, False),
        ({"microbatches": 2, "compile": "stages"}, False),
        ({"microbatches": 2, "recompute": "attention"}, False),
        ({"microbatches": 2, "mesh": "pipeline=2"}, True),
        ({"microbatches": 2, "mesh": "data=2"}, False),
        ({"microbatches": 4, "mesh": "pipeline=2", "schedule": "interleaved-zero-bubble"}, False),
    ],
)
def test_plans_whose_eager_backward_adds_products(options: dict[str, Any], expected: bool) -> None:
    plan = sw.Plan.of("small", 8, **options)
    assert accumulates_in_products(plan, torch.device("cuda")) is expected
    assert not accumulates_in_products(plan, torch.device("cpu"))


def test_the_share_that_forecasts_add_up_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 + 8 elements, the weight's 64 are added up inside the product."""
    monkeypatch.setattr(in_products, "MIN_EAGER_ELEMENTS", 64)
    plan = sw.Plan.of("small", 8, microbatches=2)
    assert separate_share(plan, nn.Linear(8, 8), torch.device("cuda")) == pytest.approx(8 / 72)
    assert separate_share(plan, nn.Linear(8, 7), torch.device("cuda")) == 1
    assert separate_share(plan, nn.Linear(8, 8), torch.device("cpu")) == 1
