"""Data of one's own: a Dataset, a DataLoader, splits by name, dictionaries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from stagewright.errors import UsageError
from stagewright.zoo.loss import default_loss
from stagewright.zoo.model import Batch, Model
from stagewright.zoo.tasks.task import load_task
from stagewright.zoo.tasks.user_task import DatasetSamples, default_batch

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])
pairs = TensorDataset(x, y)
class Rows:
    column_names = ["x", "note", "label"]
    def with_format(self, kind): assert kind == "torch"; return self
    def __len__(self): return 6
    def __getitem__(self, index): return {"x": x[index], "note": index, "label": y[index]}
def loader(): return DataLoader(pairs, batch_size=3), TensorDataset(x[:2], y[:2])
def splits(): return {"train": Rows(), "validation": Rows(), "unsupervised": Rows()}
def numbers(): return TensorDataset(x, x.sum(1))
def sized(model): return TensorDataset(torch.ones(4, model.module[0].in_features), torch.zeros(4).long())
def wrong(): return 3
def broken(): raise ValueError("no disk")
"""


class _Named(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)  # type: ignore[no-any-return]


def _model(outputs: int = 3) -> Model:
    def example(size: int) -> Batch:
        return Batch(args=(torch.ones(size, 2),))

    module = _Named(nn.Linear(2, outputs))
    return Model(
        name="m", module=module, args=(torch.ones(2, 2),), loss=default_loss, batch_size=2, make_example=example
    )


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_data.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_data_loader_gives_samples_and_batch_size() -> None:
    task = load_task("own_data:loader", _model())
    assert (len(task.dataset("train")), len(task.dataset("evaluation"))) == (6, 2)
    batch = task.dataset("train").batch([4, 1])
    assert batch.args[0].tolist() == [[8.0, 9.0], [2.0, 3.0]]
    assert batch.target.tolist() == [1, 1]
    assert (task.metric_name, default_batch("own_data:loader"), default_batch("own_data:sized")) == (
        "accuracy",
        3,
        None,
    )


def test_dictionaries_become_arguments_of_the_model() -> None:
    batch = load_task("own_data:splits", _model()).dataset("train").batch([2])
    assert (batch.args, list(batch.kwargs), batch.target.tolist()) == ((), ["x"], [2])


def test_numbers_are_learned_by_squared_error() -> None:
    task = load_task("own_data:numbers", _model(1))
    assert (task.metric, task.metric_name) == (None, "evaluation_loss")
    loss = task.loss(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0]))
    assert float(loss) == 2.0


def test_a_function_may_take_the_model() -> None:
    assert load_task("own_data:sized", _model()).dataset("train").batch([0]).args[0].shape == (1, 2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_data:wrong", "gives a value of type int; return \\(train, evaluation\\)"),
        ("own_data:broken", "failed: ValueError: no disk"),
        ("own_data:laoder", "did you mean 'loader'"),
        ("no_data:x", "no module named 'no_data'"),
    ],
)
def test_what_is_no_data_is_one_sentence(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_task(name, _model())


class _Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.ones(2), 0


def test_a_stream_without_length_is_refused() -> None:
    with pytest.raises(UsageError, match="without a length"):
        DatasetSamples("t", _Endless(), _model())


def test_workers_of_a_loader_read_ahead() -> None:
    data = TensorDataset(torch.arange(8.0).reshape(4, 2), torch.arange(4))
    samples = DatasetSamples("t", DataLoader(data, num_workers=1, multiprocessing_context="fork"), _model())
    assert [batch.target.tolist() for batch in samples.stream([[3, 0], [1]])] == [[3, 0], [1]]
