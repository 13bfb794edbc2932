"""A loss that depends on which samples share a batch is reported with both values; there is no result if unsure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from stagewright.engine.batch.microbatch import MicroBatch
from stagewright.engine.parity.whole_batch import compare_whole_batch
from stagewright.runs.result import WholeBatchLoss

CPU = torch.device("cpu")
BATCH = 16


def split_batch(num: int) -> list[MicroBatch]:
    x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(1))
    y = torch.arange(BATCH) % 3
    size = BATCH // num
    return [
        MicroBatch(
            replica=0,
            args=(x[first : first + size],),
            kwargs={},
            target=y[first : first + size],
            num_samples=size,
            weight=size / BATCH,
            first_sample=first,
        )
        for first in range(0, BATCH, size)
    ]


def compare(model: nn.Module, loss: Any = functional.cross_entropy, **more: Any) -> WholeBatchLoss | None:
    (whole,) = split_batch(1)
    options = {"known_loss": None, "dtype": "float32", "device": CPU, **more}
    return compare_whole_batch(model, split_batch(4), whole, loss, **options)


def classifier(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 3))


def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Each sample against all others in its batch."""
    return functional.cross_entropy(output @ output.T, torch.arange(len(output)))


def test_mean_over_samples_is_independent_of_the_batch() -> None:
    result = compare(classifier(nn.GELU()))
    assert result is not None
    assert not result.depends
    assert result.difference < 1e-6
    assert result.loss == pytest.approx(result.loss_of_pieces)
    assert (result.pieces, result.samples, result.without_dropout) == (4, 4, False)


@pytest.mark.parametrize("kind", ["in-batch negatives", "batch norm", "mean over tokens"])
def test_losses_that_depend_on_the_batch(kind: str) -> None:
    """Both losses are those of the plain model; a known loss of the micro-batches is used."""

    def over_tokens(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        rows = torch.where(target[0] == 0, 1, 2)  # differs between micro-batches
        return functional.cross_entropy(output[:rows], target[:rows])

    model = classifier(nn.BatchNorm1d(8)) if kind == "batch norm" else classifier()
    loss = {"in-batch negatives": contrastive, "mean over tokens": over_tokens}.get(kind, functional.cross_entropy)
    result = compare(model, loss)
    assert result is not None
    assert result.depends
    with torch.no_grad():
        (whole,) = split_batch(1)
        assert result.loss == pytest.approx(float(loss(model(*whole.args), whole.target)))
        losses = [float(loss(model(*part.args), part.target)) for part in split_batch(4)]
    assert result.loss_of_pieces == pytest.approx(sum(losses) / 4)
    assert result.difference == pytest.approx(
        abs(result.loss - result.loss_of_pieces) / max(result.loss, result.loss_of_pieces)
    )
    repeated = compare(model, loss, known_loss=result.loss)
    assert repeated is not None
    assert not repeated.depends


class RandomLayers(nn.Module):
    """Stochastic depth, attention dropout and functional dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.rand([]) > 0.1:
            x = self.layer(x)
        x = x[:, None] + self.attention(x[:, None], x[:, None], x[:, None])[0]
        return functional.dropout(x[:, 0], 0.5)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.AlphaDropout(0.3), RandomLayers()])
def test_dropout_is_disabled(layer: nn.Module) -> None:
    """Masks are drawn per micro-batch, so both losses are computed without dropout, ignoring a known loss."""
    result = compare(classifier(layer), known_loss=99.0)
    assert result is not None
    assert not result.depends
    assert result.without_dropout
    mixed = compare(classifier(layer, nn.BatchNorm1d(8)))
    assert mixed is not None
    assert mixed.depends


class RandomChoice(nn.Module):
    """Random numbers that can't be disabled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.multinomial(torch.ones(3), 1)


class FourSamples(nn.Module):
    """Accepts only batches of 4 or 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(4, 1)


def test_no_result_if_unsure() -> None:
    assert compare(classifier(RandomChoice())) is None
    assert compare(classifier(FourSamples())) is None
    assert compare(classifier(), lambda output, target: output.sum() * float("nan")) is None


def test_whole_batch_is_skipped_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    from stagewright.engine.parity import whole_batch

    model = classifier()
    parameters = sum(parameter.numel() * 4 for parameter in model.parameters())
    # At the last layer: a copy of the inputs, the outputs of the first and of the second layer.
    needed = BATCH * (6 + 8 + 3) * 4
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    assert compare(model, memory_bytes=parameters + needed - 1) is None
    assert seen == [4]
    assert compare(model, memory_bytes=parameters + needed) is not None
    assert seen[-1] == BATCH
    monkeypatch.setattr(whole_batch, "available_bytes", lambda: 2 * needed - 1)
    assert compare(model) is None


def test_model_and_random_state_are_unchanged() -> None:
    model = classifier(nn.Dropout(0.5), nn.BatchNorm1d(8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert compare(model) is not None
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


def test_tiny_losses_are_rounding() -> None:
    def tiny(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.tensor(1e-7 if len(output) == BATCH else 2e-7)

    result = compare(classifier(), tiny)
    assert result is not None
    assert result.difference == pytest.approx(0.5)
    assert not result.depends
