"""The loss that a model computes itself, and the surrogate loss if it computes none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from stagewright.errors import UsageError
from stagewright.zoo.loss import classification, default_loss, find_model_loss, loss_source, model_loss, surrogate_loss


@dataclass
class Result:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


SCALAR, VECTOR = torch.tensor(2.5), torch.ones(4)


@pytest.mark.parametrize("output", [{"loss": SCALAR, "logits": VECTOR}, Result(VECTOR, SCALAR), SCALAR])
def test_a_scalar_called_loss_is_the_models_own(output: Any) -> None:
    assert find_model_loss(output) is SCALAR
    assert default_loss(output).item() == 2.5
    assert model_loss(output).item() == 2.5
    assert loss_source(default_loss, output) == "model"


def test_a_dictionary_of_scalars_is_summed() -> None:
    output = {"classification": SCALAR, "boxes": torch.tensor(1.5)}
    assert default_loss(output).item() == model_loss(output).item() == 4
    assert loss_source(default_loss, output) == "model"
    assert find_model_loss({**output, "logits": VECTOR}) is None
    assert find_model_loss({**output, "loss": VECTOR}) is None
    assert find_model_loss({}) is None


@pytest.mark.parametrize(
    "output",
    [VECTOR, {"logits": VECTOR}, Result(VECTOR), {"loss": VECTOR}, {"loss": torch.tensor(3)}, (SCALAR, VECTOR)],
)
def test_nothing_else_is(output: Any) -> None:
    """Not a loss for each sample, not a whole number, not a scalar in a tuple, which may be a part of the loss."""
    assert find_model_loss(output) is None
    assert loss_source(default_loss, output) == "stand-in"
    assert loss_source(classification, output) == "given"
    with pytest.raises(UsageError, match=r"the model returned .*; give loss=function"):
        model_loss(output)


NORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer norm": nn.LayerNorm(16, elementwise_affine=False),
    "batch norm": nn.BatchNorm1d(16, affine=False),
    "unit length": nn.functional.normalize,
    "softmax": nn.Softmax(-1),
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_normalised_output_has_gradients_that_are_more_than_rounding(norm: str) -> None:
    """Beside those of the same layer without the norm; a mean square has none of some of them."""
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 16), torch.randn(64, 8)
    outputs = layer(x)
    normed = NORMS[norm](outputs)
    (found,) = torch.autograd.grad(surrogate_loss(normed), layer.weight, retain_graph=True)
    (plain,) = torch.autograd.grad(surrogate_loss(outputs), layer.weight, retain_graph=True)
    assert found.abs().max() > 1e-2 * plain.abs().max()
    if norm != "softmax":
        (square,) = torch.autograd.grad(normed.square().mean(), layer.weight)
        assert square.abs().max() < 1e-2 * found.abs().max()  # what is left is rounding, and the norm's epsilon


def test_it_is_a_mean_over_samples_wherever_the_batch_is() -> None:
    torch.manual_seed(0)
    result = {"tokens": torch.randn(12, 5, 7), "states": torch.randn(2, 12, 3), "lengths": torch.arange(12)}

    def some(rows: slice) -> torch.Tensor:
        return surrogate_loss({"tokens": result["tokens"][rows], "states": result["states"][:, rows]})

    in_pieces = 3 / 12 * some(slice(0, 3)) + 9 / 12 * some(slice(3, 12))
    torch.testing.assert_close(in_pieces, surrogate_loss(result))
    turned = {"tokens": result["tokens"].flip(0), "states": result["states"].flip(1)}
    torch.testing.assert_close(surrogate_loss(turned), surrogate_loss(result))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_type_and_shape(dtype: torch.dtype) -> None:
    values = torch.linspace(-3, 3, 24).reshape(4, 6)
    wide = surrogate_loss((values, torch.tensor(4.0), torch.empty(0, 3)))
    found = surrogate_loss((values.to(dtype), torch.tensor(4.0, dtype=dtype), torch.empty(0, 3, dtype=dtype)))
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert found.item() == pytest.approx(wide.item(), rel=1e-2)
    assert surrogate_loss(torch.full((2, 1), 1e4, dtype=torch.float16)).isfinite()


def test_nothing_to_take_a_loss_of() -> None:
    with pytest.raises(UsageError, match="without a floating-point tensor"):
        surrogate_loss({"ids": torch.arange(3)})
    assert surrogate_loss([{"boxes": torch.zeros(0, 4)}]).item() == 0  # a detector that finds nothing
