"""How a study trains a task: the backbone, its size and batch, and where data and weights come from.

--data-dir DIR       cifar10/, glue/rte/ … as `stagewright train` finds them; without it, the embedded digits
--weights DIR    a config.json of the backbone's model type, in DIR or in one of its folders; else next to the data
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stagewright.errors import DataMissing, UnknownName, UsageError
from stagewright.files.json_values import read_object_or_empty
from stagewright.spec.plan import ModelSpec
from stagewright.zoo import tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecipe:
    """A task with its backbone and hyperparameters; RECIPES has the defaults."""

    task: str
    model: str
    kind: str | None
    """`model_type` in the config.json of its weights; None: it has no pretrained weights."""
    batch: int
    """Samples per step."""
    learning_rate: float
    """For AdamW."""
    size: int | None = None
    """Image size in pixels, or tokens per sample."""
    quick_size: int | None = None
    client: tuple[int, int] = (1, 1)
    """Units at the start and at the end that the client keeps, as published."""
    weights: str | None = None
    """Folder of pretrained weights; None: random weights."""

    @property
    def shown_data(self) -> str:
        """The data set as tables name it."""
        return {"cifar10": "CIFAR-10", "rte": "RTE", "cola": "CoLA", "mnist": "MNIST"}.get(self.task, self.task)

    @property
    def metric(self) -> str:
        """accuracy or matthews."""
        return tasks.entry(self.task).metric

    def model_spec(self, seed: int) -> ModelSpec:
        """The model with this recipe's weights, input size and number of classes."""
        entry = tasks.entry(self.task)
        return ModelSpec(
            name=self.model,
            weights=self.weights,
            image_size=self.size if entry.kind == "image" else None,
            sequence_length=self.size if entry.kind == "text" else None,
            num_classes=entry.num_classes,
            seed=seed,
        )


_MINILM = TrainingRecipe(task="rte", model="bert-minilm", kind="bert", batch=32, learning_rate=5e-5, client=(2, 2))

RECIPES: Mapping[str, TrainingRecipe] = {
    "cifar10": TrainingRecipe(
        task="cifar10", model="mobilenet-v2", kind="mobilenet_v2", batch=64, learning_rate=1e-3, size=96, quick_size=32
    ),
    "rte": replace(_MINILM, size=128, quick_size=32),
    "cola": replace(_MINILM, task="cola", size=64, quick_size=16),
    "digits": TrainingRecipe(task="digits", model="digits-vit", kind=None, batch=64, learning_rate=1e-3),
}
"""By task."""


def choose_recipe(
    task: str,
    *,
    data: str | None,
    weights: str | None,
    quick: bool,
    size: int | None = None,
    batch: int | None = None,
    learning_rate: float | None = None,
    model: str | None = None,
) -> TrainingRecipe:
    """Return the recipe of a task with the given values instead of its defaults; check that data and weights exist."""
    if task not in RECIPES:
        raise UnknownName("task of this study", task, RECIPES)
    recipe = RECIPES[task]
    if model is not None:
        recipe = replace(recipe, model=model, kind=None, weights=weights)
    if learning_rate is not None and not (math.isfinite(learning_rate) and learning_rate > 0):
        raise UsageError(f"--learning-rate {learning_rate}: must be above 0, like {recipe.learning_rate}")
    folder = tasks.entry(task).folder
    if folder and data is None:
        raise UsageError(
            f"the task {task!r} needs its data: give --data-dir DIR with {folder}/ in it, or leave --tasks out: "
            "then it trains on the embedded digits"
        )
    if folder and data is not None and not _has_data(data, task):
        looked = repr(str(_data_folders(data, task)[0]))
        raise DataMissing(f"the folder {data!r} has no parquet files of {task!r}: looked in {looked}")
    if size is None and recipe.size is not None:
        size = recipe.quick_size if quick else recipe.size
    return replace(
        recipe,
        size=size if recipe.size is not None else None,
        batch=recipe.batch if batch is None else batch,
        learning_rate=recipe.learning_rate if learning_rate is None else learning_rate,
        weights=find_weights(recipe, weights, data) if model is None else weights,
    )


def data_folder(path: str | Path | None) -> str | None:
    """Resolve the folder of data sets: the given one, else STAGEWRIGHT_DATA, else None."""
    text = str(path) if path is not None else os.environ.get("STAGEWRIGHT_DATA") or None
    if text is not None and not Path(text).expanduser().is_dir():
        raise DataMissing(
            f"the data folder {text!r} does not exist: give --data-dir DIR with cifar10/ or glue/rte/ in it"
        )
    return None if text is None else str(Path(text).expanduser().resolve())


def tasks_in(data: str | None, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Return the wanted tasks whose files are in the folder, or the embedded digits if it has none of them."""
    return tuple(task for task in wanted if data is not None and _has_data(data, task)) or ("digits",)


def _data_folders(data: str, task: str) -> list[Path]:
    entry = tasks.entry(task)
    root = Path(data)
    folder = root / entry.folder
    candidates = [folder, folder / (entry.configuration or ""), folder / "data"]
    return [*candidates, root] if entry.folder in root.name else candidates


def _has_data(data: str, task: str) -> bool:
    return any(next(folder.glob("train*.parquet"), None) is not None for folder in _data_folders(data, task))


def find_weights(recipe: TrainingRecipe, weights: str | None, data: str | None) -> str | None:
    """Find the folder with weights of the backbone's model type; None: train from random weights."""
    if weights is not None and not Path(weights).expanduser().is_dir():
        raise DataMissing(f"the weights folder {weights!r} does not exist; give a folder with config.json and weights")
    if recipe.kind is None:
        return None
    for root in (weights, data):
        if root is None:
            continue
        top = Path(root).expanduser().resolve()
        for folder in (top, *sorted(path for path in top.iterdir() if path.is_dir())):
            model_type = read_object_or_empty(folder / "config.json").get("model_type")
            if model_type == recipe.kind and any(folder.glob("*.safetensors")):
                return str(folder)
    if weights is not None:
        raise DataMissing(
            f"the weights folder {weights!r} and its subfolders hold no {recipe.kind!r} for {recipe.model!r} "
            "(config.json with that model_type, next to *.safetensors)"
        )
    return None
