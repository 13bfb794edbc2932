"""A task: a data set in the format of a model, with loss and metric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from stagewright.errors import DataMissing, UnknownName, UsageError
from stagewright.user_code import check_module
from stagewright.zoo.blueprint import Blueprint
from stagewright.zoo.loss import logits_of
from stagewright.zoo.model import ImageInput, Loss, Model, Objective, TextInput
from stagewright.zoo.named import catalog as models
from stagewright.zoo.sources.factory import describe_arguments, find_factory
from stagewright.zoo.tasks import catalog, dataset_files, image, sentence, user_task
from stagewright.zoo.tasks.metric import METRICS
from stagewright.zoo.tasks.samples import Samples
from stagewright.zoo.tasks.synthetic import Synthetic


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """The data, loss and metric of a training run."""

    name: str
    description: str
    num_classes: int | None
    """Number of classes; None for next-token prediction."""
    loss: Loss
    """`loss(output, target)`, a scalar."""
    metric: Callable[[ArrayLike, ArrayLike], float] | None
    """`metric(predictions, labels)` of predicted and true classes; None: the evaluation loss."""
    metric_name: str
    """Name of the metric in tables."""
    splits: tuple[str, str]
    """The training and the evaluation split."""
    objective: Objective
    """Classification or next-token prediction."""
    make_samples: Callable[[str], Samples]
    """Read a split; called by `dataset`."""

    def dataset(self, split: str) -> Samples:
        """Return the samples of one of `splits`, e.g. "train"; "evaluation" is the evaluation split."""
        if split == "evaluation":
            split = self.splits[1]
        if split not in self.splits:
            raise UnknownName(f"split of {self.name!r} with labels", split, [*self.splits, "evaluation"])
        return self.make_samples(split)

    def predictions(self, output: Any, target: torch.Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return predicted and true classes for `metric`, from the output and target of a batch."""
        predicted = logits_of(output).detach().argmax(-1)
        if self.objective == "next-token":
            predicted, target = predicted[:, :-1].flatten(), target[:, 1:].flatten()
            predicted, target = predicted[target != -100], target[target != -100]
        return np.asarray(predicted.cpu()), np.asarray(target.cpu())


def load_task(
    name: str, model: Model, *, data_dir: str | Path | None = None, tokenizer: str | Path | None = None, seed: int = 0
) -> Task:
    """Load the task `name` for `model`; files are read when a split is requested.

    `data_dir` is a folder of parquet files (default: STAGEWRIGHT_DATA), `tokenizer` a folder with tokenizer.json.
    """
    if (source := catalog.own_data(name)) is not None:
        return _user_task(source, model)
    entry = catalog.entry(name)
    check_compatible(entry, model.name, model)
    inputs = model.inputs
    assert inputs is not None
    dtype = next(value.dtype for value in model.module.parameters() if value.is_floating_point())
    folder = Path(data_dir).expanduser() if data_dir is not None else None
    loaded_tokenizer = None
    if entry.kind == "text" and isinstance(inputs, TextInput):
        tokenizer_folder = Path(tokenizer).expanduser() if tokenizer is not None else None
        loaded_tokenizer = sentence.load_tokenizer(name, model, inputs, tokenizer_folder)

    def make_samples(split: str) -> Samples:
        if name == "synthetic":
            return Synthetic(split, model, inputs, seed, dtype)
        if isinstance(inputs, TextInput):
            return sentence.TextSamples(
                dataset_files.read(entry, split, folder), entry.columns, inputs, loaded_tokenizer
            )
        if name == "digits":
            return image.digits(split, inputs, dtype)
        return image.from_table(dataset_files.read(entry, split, folder), entry.columns[0], inputs, dtype)

    return Task(
        name=name,
        description=entry.description,
        num_classes=model.num_classes,
        loss=model.loss,
        metric=METRICS[entry.metric],
        metric_name=entry.metric,
        splits=entry.splits,
        objective=model.objective,
        make_samples=make_samples,
    )


def _user_task(name: str, model: Model) -> Task:
    """Load a user's task, `package.module:name`."""
    data = user_task.find_data(name, model)
    evaluation = data.train if data.evaluation is None else data.evaluation
    sources = {"train": data.train, "evaluation": evaluation}
    target = user_task.DatasetSamples(name, data.train, model).batch([0]).target
    metric_name, metric = user_task.choose_metric(data, target)
    return Task(
        name=name,
        description="",
        num_classes=model.num_classes,
        loss=user_task.choose_loss(data, model, target),
        metric=metric,
        metric_name=metric_name,
        splits=("train", "evaluation"),
        objective=model.objective,
        make_samples=lambda split: user_task.DatasetSamples(name, sources[split], model),
    )


def check_task(name: str, model: str, about: Model | Blueprint, *, data_dir: str | Path | None = None) -> None:
    """Raise UsageError if the model can't learn the task or its files are missing, without reading them."""
    if (source := catalog.own_data(name)) is not None:
        check_module(source, "task", "task")
        if data_dir is not None:
            raise UsageError(f"--data-dir {data_dir} is for built-in tasks; {name} reads its own data: leave it out")
        return
    entry = catalog.entry(name)
    check_compatible(entry, model, about)
    folder = Path(data_dir).expanduser() if data_dir is not None else None
    if folder is not None and not folder.is_dir():
        raise DataMissing(f"--data-dir is {str(folder)!r}, which is not a folder; give a folder, or leave it out")
    if entry.folder:
        for split in entry.splits:
            dataset_files.find(entry, split, folder)


def check_compatible(entry: catalog.Entry, model: str, about: Model | Blueprint) -> None:
    """Raise UsageError if the model can't learn the task."""
    classes = "" if entry.num_classes is None else f", num_classes={entry.num_classes}"
    if about.inputs is None or about.objective == "none":
        inputs = "TextInput(…)" if entry.kind == "text" else "ImageInput(channels=…, size=…)"
        needs = "" if entry.num_classes is None else f" and needs num_classes={entry.num_classes}"
        raise UsageError(
            f"the task {entry.name!r} can't feed the model {model!r}, whose inputs are unknown: it provides "
            f"{'samples' if entry.kind == 'any' else f'{entry.kind}s'}{needs}{_factory_note(model)}; let the factory "
            f'return stagewright.zoo.Model(…, inputs={inputs}, objective="classify"{classes})'
        )
    kind = "image" if isinstance(about.inputs, ImageInput) else "text"
    if entry.kind not in ("any", kind):
        compatible = [task.name for task in catalog.ENTRIES if task.kind in ("any", kind)]
        raise UsageError(
            f"the task {entry.name!r} consists of {entry.kind}s, but the model {model!r} takes {kind}s; "
            f"compatible tasks: {', '.join(compatible)}"
        )
    if entry.num_classes is not None and about.objective != "classify":
        raise UsageError(
            f"the task {entry.name!r} needs a classifier, but the model {model!r} predicts the next "
            "token; use the task 'synthetic'"
        )
    if entry.num_classes is not None and entry.num_classes != about.num_classes:
        raise UsageError(
            f"the task {entry.name!r} has {entry.num_classes} classes, but the model {model!r} has "
            f"{about.num_classes}{_factory_note(model)}; load the model with num_classes={entry.num_classes}"
        )


def _factory_note(model: str) -> str:
    """Describe the parameters of a user's factory for an error message."""
    return f", and the factory takes {describe_arguments(find_factory(model))}" if models.is_factory(model) else ""
