"""A task: a data set in the form that one model takes, with its loss and its metric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from stagewright.errors import DataMissing, UnknownName, UsageError
from stagewright.zoo.blueprint import Blueprint
from stagewright.zoo.loss import logits_of
from stagewright.zoo.model import ImageInput, Loss, Model, Objective, TextInput
from stagewright.zoo.named import catalog as models
from stagewright.zoo.sources.factory import arguments, find_factory
from stagewright.zoo.tasks import catalog as catalogue
from stagewright.zoo.tasks import image as picture
from stagewright.zoo.tasks import sentence, table
from stagewright.zoo.tasks.metric import METRICS
from stagewright.zoo.tasks.samples import Samples
from stagewright.zoo.tasks.synthetic import Synthetic


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """What a model is trained on and judged by."""

    name: str
    """Its name in the list."""
    description: str
    """One line for lists."""
    num_classes: int | None
    """Number of classes; None for the next token."""
    loss: Loss
    """`loss(output, target)`, a scalar."""
    metric: Callable[[ArrayLike, ArrayLike], float]
    """`metric(predictions, labels)` over predicted and true classes; more is better."""
    metric_name: str
    """What the metric is called in tables."""
    splits: tuple[str, str]
    """The split to train on, and the one to judge by."""
    objective: Objective
    """What is predicted: a class for each sample, or the next token."""
    make_samples: Callable[[str], Samples]
    """Reads a split; called through `dataset`."""

    def dataset(self, split: str) -> Samples:
        """The samples of one of `splits`, e.g. "train"; "evaluation" is the one to judge by."""
        if split == "evaluation":
            split = self.splits[1]
        if split not in self.splits:
            raise UnknownName(f"split of {self.name!r} with labels", split, [*self.splits, "evaluation"])
        return self.make_samples(split)

    def predictions(self, output: Any, target: torch.Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
        """Predicted and true classes for `metric`, from the model's output and target for a batch."""
        predicted = logits_of(output).detach().argmax(-1)
        if self.objective == "next-token":
            predicted, target = predicted[:, :-1].flatten(), target[:, 1:].flatten()
            predicted, target = predicted[target != -100], target[target != -100]
        return np.asarray(predicted.cpu()), np.asarray(target.cpu())


def load_task(
    name: str,
    model: Model,
    *,
    data_dir: str | Path | None = None,
    tokenizer: str | Path | None = None,
    seed: int = 0,
) -> Task:
    """The task called `name` for `model`; files are read when a split is asked for.

    `data_dir` is a folder of parquet files (else STAGEWRIGHT_DATA), `tokenizer` a folder with tokenizer.json.
    """
    entry = catalogue.entry(name)
    refuse_misfits(entry, model.name, model)
    inputs = model.inputs
    assert inputs is not None
    dtype = next(one.dtype for one in model.module.parameters() if one.is_floating_point())
    folder = Path(data_dir).expanduser() if data_dir is not None else None
    words = None
    if entry.kind == "text" and isinstance(inputs, TextInput):
        named = Path(tokenizer).expanduser() if tokenizer is not None else None
        words = sentence.load_tokenizer(name, model, inputs, named)

    def make_samples(split: str) -> Samples:
        if name == "synthetic":
            return Synthetic(split, model, inputs, seed, dtype)
        if isinstance(inputs, TextInput):
            return sentence.Sentences(table.read(entry, split, folder), entry.columns, inputs, words)
        if name == "digits":
            return picture.digits(split, inputs, dtype)
        return picture.from_table(table.read(entry, split, folder), entry.columns[0], inputs, dtype)

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


def check_task(name: str, model: str, about: Model | Blueprint, *, data_dir: str | Path | None = None) -> None:
    """UsageError where the model can't learn the task, or where its files are not on this machine; reads none."""
    entry = catalogue.entry(name)
    refuse_misfits(entry, model, about)
    folder = Path(data_dir).expanduser() if data_dir is not None else None
    if folder is not None and not folder.is_dir():
        raise DataMissing(f"--data-dir is {str(folder)!r}, which is no folder; name one, or leave it out")
    if entry.folder:
        for split in entry.splits:
            table.find(entry, split, folder)


def refuse_misfits(entry: catalogue.Entry, model: str, about: Model | Blueprint) -> None:
    """UsageError where the model can't learn the task, with what to change."""
    classes = "" if entry.num_classes is None else f", num_classes={entry.num_classes}"
    if about.inputs is None or about.objective == "none":
        feeds = "TextInput(…)" if entry.kind == "text" else "ImageInput(channels=…, size=…)"
        asks = "" if entry.num_classes is None else f" and asks for num_classes={entry.num_classes}"
        raise UsageError(
            f"the task {entry.name!r} can't feed the model {model!r}, whose inputs are not known: it gives "
            f"{'samples' if entry.kind == 'any' else f'{entry.kind}s'}{asks}{_taken(model)}; let the factory return "
            f'stagewright.zoo.Model(…, inputs={feeds}, objective="classify"{classes})'
        )
    takes = "image" if isinstance(about.inputs, ImageInput) else "text"
    if entry.kind not in ("any", takes):
        fitting = [one.name for one in catalogue.ENTRIES if one.kind in ("any", takes)]
        raise UsageError(
            f"the task {entry.name!r} is made of {entry.kind}s, but the model {model!r} takes {takes}s; "
            f"tasks for it: {', '.join(fitting)}"
        )
    if entry.num_classes is not None and about.objective != "classify":
        raise UsageError(
            f"the task {entry.name!r} needs a classifier, but the model {model!r} predicts the next "
            "token; the task 'synthetic' suits it"
        )
    if entry.num_classes is not None and entry.num_classes != about.num_classes:
        raise UsageError(
            f"the task {entry.name!r} has {entry.num_classes} classes, but the model {model!r} has "
            f"{about.num_classes}{_taken(model)}; load the model with num_classes={entry.num_classes}"
        )


def _taken(model: str) -> str:
    """What a user's factory may be asked for, in words."""
    return f", and the factory takes {arguments(find_factory(model))}" if models.is_factory(model) else ""
