"""Which dimension of an example is the batch, where layers with `batch_first=False` take the second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stagewright as sw
from stagewright.zoo.example import resized
from stagewright.zoo.model import Batch

TAGGER = """
import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Linear(8, 16), nn.LSTM(16, 16), nn.Linear(16, 4)

    def forward(self, steps):
        return self.head(self.lstm(self.embed(steps))[0]).square().mean()


def model():
    torch.manual_seed(0)
    return Tagger(), (torch.randn(12, 4, 8),)
"""


class Transposing(nn.Module):
    """Takes the batch first, for a layer that takes it second."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: torch.Tensor) -> Any:
        steps = x.transpose(0, 1)
        return self.attention(steps, steps, steps)[0].transpose(0, 1)


class Packed(nn.Module):
    """Takes steps first, and a length for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 8)

    def forward(self, steps: torch.Tensor, lengths: torch.Tensor) -> Any:
        return self.gru(steps)[1][0] * lengths.view(-1, 1)


class Continued(nn.Module):
    """Takes sequences batch first, and the state before them, which has the batch second."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor) -> Any:
        return self.lstm(x, (hidden, cell))[0]


def shapes(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in batch.args]


@pytest.mark.parametrize(
    ("module", "example", "size", "expected"),
    [
        (nn.LSTM(8, 8), [(12, 4, 8)], 4, [(12, 6, 8)]),
        (nn.LSTM(8, 8, batch_first=True), [(4, 12, 8)], 4, [(6, 12, 8)]),
        (nn.TransformerEncoderLayer(8, 2, 16), [(12, 4, 8)], 4, [(12, 6, 8)]),
        (nn.MultiheadAttention(8, 2), [(5, 4, 8)] * 3, 4, [(5, 6, 8)] * 3),
        (Transposing(), [(4, 12, 8)], 4, [(6, 12, 8)]),
        (Packed(), [(12, 4, 8), (4,)], 4, [(12, 6, 8), (6,)]),
        (Continued(), [(4, 12, 8), (1, 4, 8), (1, 4, 8)], 4, [(6, 12, 8), (1, 6, 8), (1, 6, 8)]),
        (nn.Linear(8, 8), [(12, 4, 8)], 12, [(6, 4, 8)]),
    ],
    ids=["lstm", "batch-first", "encoder", "attention", "transposing", "lengths", "states", "linear"],
)
def test_the_dimension_of_the_layers_batch(
    module: nn.Module, example: list[tuple[int, ...]], size: int, expected: list[tuple[int, ...]]
) -> None:
    found, make = resized(Batch(args=tuple(torch.ones(shape) for shape in example)), module)
    assert found == size
    assert shapes(make(6)) == expected


def test_a_target_of_either_form_is_resized() -> None:
    steps = torch.ones(12, 4, 8)
    for target, shape in ((torch.ones(12, 4), (12, 6)), (torch.ones(4), (6,)), (torch.ones(4, 3), (6, 3))):
        _, make = resized(Batch(args=(steps,), target=target), nn.LSTM(8, 8))
        assert tuple(make(6).target.shape) == shape


def test_finding_it_leaves_the_model_alone() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.RNN(8, 8)).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    batch = Batch(args=(torch.randn(12, 4, 8),))
    state = torch.get_rng_state()
    resized(batch, module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert len(module[1]._forward_pre_hooks) == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_replicas_divide_samples_and_not_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "steps_first.py").write_text(TAGGER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = sw.compare(
        "steps_first:model", devices=["cpu:0", "cpu:0"], strategies=["serial", "data", "pipeline"], batch=6, steps=1,
        microbatches=2,
    )  # fmt: skip
    rows = found.to_dict()["rows"]
    assert [row["equal"] for row in rows] == [True] * 3
    assert max(row["whole_batch"]["difference"] for row in rows[1:]) < 1e-6, "the whole batch gives the same loss"
    assert [row["whole_batch"]["samples"] for row in rows[1:]] == [3, 3], "half of six samples"
