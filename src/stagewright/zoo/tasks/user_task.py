"""User-defined tasks: `package.module:name` is data, or a function that returns it.

    def reviews():                       without arguments, or with `model`, the loaded zoo.Model
        return train, evaluation         each a Dataset, a DataLoader or a Hugging Face dataset

A sample is `(x, …, target)`, or a dictionary of the model's arguments with `labels`, `label` or `target`. The plan's
batch and seed choose the samples of a step: of a DataLoader only its data set, `collate_fn`, `num_workers` and
`batch_size` (the default of --batch) are used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, default_collate

from stagewright.errors import StagewrightError, UsageError
from stagewright.user_code import describe, find, one_line
from stagewright.zoo.loss import classification, default_loss, logits_of
from stagewright.zoo.model import Batch, Loss, Model
from stagewright.zoo.tasks.metric import METRICS
from stagewright.zoo.tasks.samples import Samples

TARGETS = ("labels", "label", "target")
_EVALUATION_SPLITS = ("validation", "test", "evaluation")
_FIX = "return (train, evaluation), each a torch Dataset, a DataLoader or a Hugging Face dataset"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """The data of a user-defined task, and what it is trained with."""

    train: Any
    """Training samples: a map-style Dataset, a DataLoader over one, or a Hugging Face dataset."""
    evaluation: Any = None
    """Evaluation samples; None: the training samples."""
    loss: Loss | None = None
    """`loss(output, target)`; None: the model's, else cross entropy for classes and mean squared error for numbers."""
    metric: Callable[[ArrayLike, ArrayLike], float] | None = None
    """`metric(predictions, labels)` of classes; None: accuracy for classes, else the evaluation loss."""

    @property
    def batch_size(self) -> int | None:
        """The batch size of a DataLoader."""
        return self.train.batch_size if isinstance(self.train, DataLoader) else None


class DatasetSamples(Samples):
    """Samples of a data set, collated as a DataLoader would."""

    def __init__(self, name: str, source: Any, model: Model) -> None:
        self._name = name
        self._collate: Callable[[list[Any]], Any] = default_collate
        self._num_workers = 0
        if isinstance(source, DataLoader):
            self._collate, self._num_workers, source = source.collate_fn, source.num_workers, source.dataset
        if hasattr(source, "with_format") and hasattr(source, "column_names"):  # of Hugging Face
            source = source.with_format("torch")
        if isinstance(source, IterableDataset) or not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            raise UsageError(
                f"the task {name!r} gives {describe(source)} without a length, which can't be shuffled and resumed; "
                "use a map-style Dataset with __len__ and __getitem__"
            )
        if not len(source):
            raise UsageError(f"the task {name!r} gives a data set without samples")
        self._source = source
        self._dtype = next((value.dtype for value in model.module.parameters() if value.is_floating_point()), None)
        parameters = inspect.signature(model.module.forward).parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        self._arguments = None if takes_any else set(parameters)

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Read and collate the samples at `indices`."""
        try:
            return self._to_batch(self._collate([self._source[index] for index in indices]))
        except StagewrightError:
            raise
        except Exception as error:  # anything that user code may raise
            raise UsageError(f"the task {self._name!r} can't read its samples: {one_line(error)}") from error

    def stream(self, batches: Sequence[Sequence[int]]) -> Iterator[Batch]:
        """Read batches one after another, ahead of time in the DataLoader's worker processes."""
        if not self._num_workers:
            yield from super().stream(batches)
            return
        settings: dict[str, Any] = {"num_workers": self._num_workers, "collate_fn": self._collate}
        for collated in DataLoader(self._source, batch_sampler=batches, **settings):  # type: ignore[arg-type]
            yield self._to_batch(collated)

    def _to_batch(self, collated: Any) -> Batch:
        if isinstance(collated, Batch):
            return collated
        if isinstance(collated, Mapping):
            key = next((name for name in TARGETS if name in collated), None)
            if key is None:
                raise UsageError(
                    f"a sample of the task {self._name!r} has {', '.join(map(str, collated))}, but no target; name it "
                    f"{' or '.join(TARGETS)}"
                )
            rest = {name: value for name, value in collated.items() if name != key}
            if self._arguments is not None:  # a data set often has columns that the model does not take
                rest = {name: value for name, value in rest.items() if name in self._arguments}
            if not rest:
                raise UsageError(
                    f"no entry of a sample of the task {self._name!r} ({', '.join(map(str, collated))}) is an argument "
                    f"of the model ({', '.join(sorted(self._arguments or ()))}); rename or tokenize them"
                )
            return Batch(kwargs=self._cast(rest), target=collated[key])
        if isinstance(collated, tuple | list) and len(collated) >= 2:
            *args, target = collated
            return Batch(args=tuple(self._cast(args)), target=target)
        raise UsageError(
            f"a sample of the task {self._name!r} is {describe(collated)}; give (x, target), or a dictionary with "
            f"{' or '.join(TARGETS)}"
        )

    def _cast(self, values: Any) -> Any:
        """Convert floating-point inputs to the model's data type."""
        return pytree.tree_map_only(
            torch.Tensor, lambda leaf: leaf.to(self._dtype) if leaf.is_floating_point() else leaf, values
        )


def find_data(name: str, model: Model | None = None) -> TaskData:
    """Import the data that `name` refers to, and call it where it is a function."""
    value = find(name, "task", "task")
    if callable(value) and not _is_data(value):
        takes_model = "model" in inspect.signature(value).parameters
        try:
            value = value(model) if takes_model else value()
        except StagewrightError:
            raise
        except Exception as error:  # anything that user code may raise
            raise UsageError(f"the task {name!r} failed: {one_line(error)}; let it {_FIX}") from error
    if isinstance(value, TaskData):
        return value
    if isinstance(value, Mapping):  # a DatasetDict of Hugging Face
        evaluation = next((value[split] for split in _EVALUATION_SPLITS if split in value), None)
        if "train" not in value:
            raise UsageError(f"the task {name!r} gives splits {', '.join(map(str, value))}; it needs one called train")
        return TaskData(train=value["train"], evaluation=evaluation)
    if isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_data, value)):
        return TaskData(train=value[0], evaluation=value[1])
    if _is_data(value):
        return TaskData(train=value)
    raise UsageError(f"the task {name!r} gives {describe(value)}; {_FIX}")


def default_batch(name: str) -> int | None:
    """Return the batch size of the task's DataLoader; None without one, or where the task needs the model."""
    value = find(name, "task", "task")
    if callable(value) and not _is_data(value) and "model" in inspect.signature(value).parameters:
        return None
    return find_data(name).batch_size


def choose_loss(data: TaskData, model: Model, target: Any) -> Loss:
    """Return the task's loss, else the model's, else one for the kind of target."""
    if data.loss is not None:
        return data.loss
    if model.loss is not default_loss:
        return model.loss
    return classification if _is_classes(target) else _squared_error


def choose_metric(data: TaskData, target: Any) -> tuple[str, Callable[[ArrayLike, ArrayLike], float] | None]:
    """Return the name of the metric and its function; None: the evaluation loss."""
    if data.metric is not None:
        return getattr(data.metric, "__name__", "metric"), data.metric
    return ("accuracy", METRICS["accuracy"]) if _is_classes(target) else ("evaluation_loss", None)


def _squared_error(output: Any, target: torch.Tensor) -> torch.Tensor:
    values = logits_of(output)
    return functional.mse_loss(values.float(), target.reshape(values.shape).float())


def _is_classes(target: Any) -> bool:
    return isinstance(target, torch.Tensor) and not target.is_floating_point()


def _is_data(value: Any) -> bool:
    return isinstance(value, DataLoader) or (
        hasattr(value, "__getitem__") and not isinstance(value, type | str | tuple)
    )
