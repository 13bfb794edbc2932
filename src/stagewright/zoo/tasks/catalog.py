"""The catalog of tasks: names, number of classes, metrics and files.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stagewright.errors import UnknownName
from stagewright.plugins import plugins
from stagewright.user_code import is_user_defined


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A named task."""

    name: str
    description: str
    """One line for lists."""
    kind: Literal["image", "text", "any"]
    """Kind of the samples; `any`: that of the model."""
    num_classes: int | None
    """Number of classes; None: that of the model."""
    metric: Literal["accuracy", "matthews"] = "accuracy"
    evaluation_split: str = "test"
    """The labeled split for evaluation."""
    columns: tuple[str, ...] = ()
    """Input columns of the parquet files: one image, or one or two sentences."""
    folder: str = ""
    """Folder of the parquet files in the data folder; empty for a task without files."""
    repository: str = ""
    """Name on the Hugging Face hub."""
    configuration: str | None = None

    @property
    def splits(self) -> tuple[str, str]:
        """The training and the evaluation split."""
        return ("train", self.evaluation_split)


ENTRIES: tuple[Entry, ...] = (
    Entry(
        name="digits",
        description="1797 handwritten digits of 8x8 pixels, embedded in scikit-learn; the default",
        kind="image",
        num_classes=10,
    ),
    Entry(
        name="mnist",
        description="70000 handwritten digits of 28x28 pixels",
        kind="image",
        num_classes=10,
        columns=("image",),
        folder="mnist",
        repository="ylecun/mnist",
        configuration="mnist",
    ),
    Entry(
        name="cifar10",
        description="60000 colour photographs of 32x32 pixels in 10 classes",
        kind="image",
        num_classes=10,
        columns=("img",),
        folder="cifar10",
        repository="uoft-cs/cifar10",
        configuration="plain_text",
    ),
    Entry(
        name="rte",
        description="GLUE RTE: does the second sentence follow from the first? 2490 pairs",
        kind="text",
        num_classes=2,
        evaluation_split="validation",
        columns=("sentence1", "sentence2"),
        folder="glue/rte",
        repository="nyu-mll/glue",
        configuration="rte",
    ),
    Entry(
        name="cola",
        description="GLUE CoLA: is the sentence good English? 8551 sentences, Matthews correlation",
        kind="text",
        num_classes=2,
        metric="matthews",
        evaluation_split="validation",
        columns=("sentence",),
        folder="glue/cola",
        repository="nyu-mll/glue",
        configuration="cola",
    ),
    Entry(
        name="synthetic",
        description="synthetic samples with a learnable rule, in the format of the model",
        kind="any",
        num_classes=None,
    ),
)

_BY_NAME = {entry.name: entry for entry in ENTRIES}


def names() -> tuple[str, ...]:
    """Return the names of the tasks, in catalog order."""
    return tuple(_BY_NAME)


def describe() -> dict[str, str]:
    """Map each name to its description, in catalog order."""
    return {entry.name: entry.description for entry in ENTRIES}


def own_data(name: str) -> str | None:
    """Return `package.module:name` of a user's task or a plug-in's; None for a name of the catalog."""
    if name in _BY_NAME:
        return None
    return name if is_user_defined(name) else plugins("tasks").get(name)


def entry(name: str) -> Entry:
    """Return the entry of that name; raise UnknownName with the closest names."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise UnknownName("task", name, [*_BY_NAME, *plugins("tasks")]) from None
