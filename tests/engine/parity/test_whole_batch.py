"""A loss that depends on which samples share a batch is told by both numbers; any other is not, nor is a guess made."""

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


def parts_of(num: int) -> list[MicroBatch]:
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


def tried(model: nn.Module, loss: Any = functional.cross_entropy, **more: Any) -> WholeBatchLoss | None:
    (whole,) = parts_of(1)
    options = {"known": None, "dtype": "float32", "device": CPU, **more}
    return compare_whole_batch(model, parts_of(4), whole, loss, **options)


def classifier(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 3))


def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Each sample against all others in its batch."""
    return functional.cross_entropy(output @ output.T, torch.arange(len(output)))


def test_a_mean_over_samples_does_not_depend() -> None:
    found = tried(classifier(nn.GELU()))
    assert found is not None
    assert not found.depends
    assert found.difference < 1e-6
    assert found.loss == pytest.approx(found.loss_of_pieces)
    assert (found.pieces, found.samples, found.without_dropout) == (4, 4, False)


@pytest.mark.parametrize("kind", ["in-batch negatives", "batch norm", "mean over tokens"])
def test_losses_that_do(kind: str) -> None:
    """By the numbers of the plain model; those of the pieces are taken where they are known."""

    def over_tokens(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        rows = torch.where(target[0] == 0, 1, 2)  # not as many in every piece
        return functional.cross_entropy(output[:rows], target[:rows])

    model = classifier(nn.BatchNorm1d(8)) if kind == "batch norm" else classifier()
    loss = {"in-batch negatives": contrastive, "mean over tokens": over_tokens}.get(kind, functional.cross_entropy)
    found = tried(model, loss)
    assert found is not None
    assert found.depends
    with torch.no_grad():
        (whole,) = parts_of(1)
        assert found.loss == pytest.approx(float(loss(model(*whole.args), whole.target)))
        pieces = [float(loss(model(*part.args), part.target)) for part in parts_of(4)]
    assert found.loss_of_pieces == pytest.approx(sum(pieces) / 4)
    assert found.difference == pytest.approx(
        abs(found.loss - found.loss_of_pieces) / max(found.loss, found.loss_of_pieces)
    )
    known = tried(model, loss, known=found.loss)
    assert known is not None
    assert not known.depends


class Skips(nn.Module):
    """A layer that is skipped at random, attention and a functional dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.rand([]) > 0.1:
            x = self.layer(x)
        x = x[:, None] + self.attention(x[:, None], x[:, None], x[:, None])[0]
        return functional.dropout(x[:, 0], 0.5)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.AlphaDropout(0.3), Skips()])
def test_dropout_is_no_difference(layer: nn.Module) -> None:
    """Masks are drawn by micro-batch: they are left out of both numbers, whatever the reference had."""
    found = tried(classifier(layer), known=99.0)
    assert found is not None
    assert not found.depends
    assert found.without_dropout
    mixed = tried(classifier(layer, nn.BatchNorm1d(8)))
    assert mixed is not None
    assert mixed.depends


class Chooses(nn.Module):
    """Random numbers that nobody can leave out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.multinomial(torch.ones(3), 1)


class Few(nn.Module):
    """Does not take more than some samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(4, 1)


def test_no_answer_is_better_than_a_wrong_one() -> None:
    assert tried(classifier(Chooses())) is None
    assert tried(classifier(Few())) is None
    assert tried(classifier(), lambda output, target: output.sum() * float("nan")) is None


def test_a_whole_batch_without_room_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from stagewright.engine.parity import whole_batch

    model = classifier()
    parameters = sum(one.numel() * 4 for one in model.parameters())
    # A copy of its inputs, what the first layer gives and what the second one does, in the last layer.
    needed = BATCH * (6 + 8 + 3) * 4
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    assert tried(model, memory_bytes=parameters + needed - 1) is None
    assert seen == [4]
    assert tried(model, memory_bytes=parameters + needed) is not None
    assert seen[-1] == BATCH
    monkeypatch.setattr(whole_batch, "available_bytes", lambda: 2 * needed - 1)
    assert tried(model) is None


def test_the_model_and_its_random_numbers_are_left_alone() -> None:
    model = classifier(nn.Dropout(0.5), nn.BatchNorm1d(8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert tried(model) is not None
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(one.grad is None for one in model.parameters())


def test_a_loss_of_nearly_nothing_is_left_over_from_larger_numbers() -> None:
    def tiny(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.tensor(1e-7 if len(output) == BATCH else 2e-7)

    found = tried(classifier(), tiny)
    assert found is not None
    assert found.difference == pytest.approx(0.5)
    assert not found.depends
