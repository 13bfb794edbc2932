"""The named tasks: what they are called, how many classes, which metric, where their files are.

Read without importing torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stagewright.errors import UnknownName

DEFAULT_TASK = "digits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One named task."""

    name: str
    """What the user types."""
    description: str
    """One line for lists."""
    kind: Literal["image", "text", "any"]
    """What its samples are; `any` follows the model."""
    num_classes: int | None
    """Number of classes; None follows the model."""
    metric: Literal["accuracy", "matthews"] = "accuracy"
    """How predictions are judged."""
    evaluation_split: str = "test"
    """The split with labels that training does not see."""
    columns: tuple[str, ...] = ()
    """Columns of the parquet files that hold the input: one image, or one or two sentences."""
    folder: str = ""
    """Where the parquet files lie below the data folder; empty for a set that needs no files."""
    repository: str = ""
    """Its name on the Hugging Face hub."""
    configuration: str | None = None
    """Which of the repository's configurations."""

    @property
    def splits(self) -> tuple[str, str]:
        """The two splits with labels."""
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
        description="made-up samples with a rule that can be learned, in the form that the model takes",
        kind="any",
        num_classes=None,
    ),
)

_BY_NAME = {one.name: one for one in ENTRIES}


def names() -> tuple[str, ...]:
    """The names of the tasks, in the order of the list."""
    return tuple(_BY_NAME)


def describe() -> dict[str, str]:
    """Name -> one line, in the order of the list."""
    return {one.name: one.description for one in ENTRIES}


def entry(name: str) -> Entry:
    """The entry called `name`, or UnknownName with the nearest ones."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise UnknownName("task", name, _BY_NAME) from None
