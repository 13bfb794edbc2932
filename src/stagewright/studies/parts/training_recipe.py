"""What a model learns in a study: a task, the backbone that learns it, where data and weights are, and how much of it.

--data DIR       cifar10/, glue/rte/ … as `stagewright train` finds them     none ─► the embedded digits
--weights DIR    config.json of the backbone's kind, in DIR or in a folder of it; else in the data's folder
num_samples      so many of the training split, equally many of each class ─► parquet files in the study's folder
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagewright.errors import DataMissing, UnknownName, UsageError
from stagewright.spec.plan import ModelSpec
from stagewright.studies.framework.study import Bench
from stagewright.zoo import tasks

__all__ = [
    "LESSONS",
    "Lesson",
    "choose_lesson",
    "data_folder",
    "find_weights",
    "keep_samples",
    "samples_folder",
    "tasks_in",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A task with its backbone; the defaults of each stand in LESSONS."""

    task: str
    """The task, and the model that learns it."""
    model: str
    kind: str | None
    """What config.json calls the model's kind; None: it is not pretrained."""
    batch: int
    """Samples in a step, and the rate of AdamW."""
    learning_rate: float
    size: int | None = None
    """Pixels a side, or tokens a sample: full, and in a quick study."""
    quick_size: int | None = None
    client: tuple[int, int] = (1, 1)
    """Units that the client keeps at the start and at the end, as was published."""
    weights: str | None = None
    """The folder of its weights; None: random ones."""

    @property
    def shown_data(self) -> str:
        """The data set as tables name it."""
        return {"cifar10": "CIFAR-10", "rte": "RTE", "cola": "CoLA", "mnist": "MNIST"}.get(self.task, self.task)

    @property
    def metric(self) -> str:
        """accuracy or matthews."""
        return tasks.entry(self.task).metric

    def model_spec(self, seed: int) -> ModelSpec:
        """The model with this lesson's weights, size and classes."""
        entry = tasks.entry(self.task)
        return ModelSpec(
            name=self.model,
            weights=self.weights,
            image_size=self.size if entry.kind == "image" else None,
            sequence_length=self.size if entry.kind == "text" else None,
            num_classes=entry.num_classes,
            seed=seed,
        )


LESSONS: Mapping[str, Lesson] = {
    "cifar10": Lesson(
        task="cifar10",
        model="mobilenet-v2",
        kind="mobilenet_v2",
        batch=64,
        learning_rate=1e-3,
        size=96,
        quick_size=32,
        client=(1, 1),
    ),
    "rte": Lesson(
        task="rte",
        model="bert-minilm",
        kind="bert",
        batch=32,
        learning_rate=5e-5,
        size=128,
        quick_size=32,
        client=(2, 2),
    ),
    "cola": Lesson(
        task="cola",
        model="bert-minilm",
        kind="bert",
        batch=32,
        learning_rate=5e-5,
        size=64,
        quick_size=16,
        client=(2, 2),
    ),
    "digits": Lesson(task="digits", model="digits-vit", kind=None, batch=64, learning_rate=1e-3),
}
"""By task."""


def choose_lesson(
    task: str,
    *,
    data: str | None,
    weights: str | None,
    quick: bool,
    size: int | None = None,
    batch: int | None = None,
    learning_rate: float | None = None,
) -> Lesson:
    """The lesson of a task, with what was chosen instead of its defaults; its data and weights are looked for."""
    if task not in LESSONS:
        raise UnknownName("task of this study", task, LESSONS)
    lesson = LESSONS[task]
    if learning_rate is not None and not (math.isfinite(learning_rate) and learning_rate > 0):
        raise UsageError(f"--learning-rate {learning_rate}: must be above 0, like {lesson.learning_rate}")
    if tasks.entry(task).folder and data is None:
        raise UsageError(
            f"the task {task!r} needs its data: give --data DIR with {tasks.entry(task).folder}/ in it, or leave "
            "--tasks out for the embedded digits"
        )
    if data is not None and tasks.entry(task).folder and not _has(data, task):
        raise DataMissing(f"the folder {data!r} has no parquet files of {task!r}: looked in {_looked(data, task)}")
    if size is None and lesson.size is not None:
        size = lesson.quick_size if quick else lesson.size
    return replace(
        lesson,
        size=size if lesson.size is not None else None,
        batch=lesson.batch if batch is None else batch,
        learning_rate=lesson.learning_rate if learning_rate is None else learning_rate,
        weights=find_weights(lesson, weights, data),
    )


def data_folder(text: str | Path | None) -> str | None:
    """The folder of data sets: the one that was given, or STAGEWRIGHT_DATA; None where there is none."""
    found = str(text) if text is not None else os.environ.get("STAGEWRIGHT_DATA") or None
    if found is not None and not Path(found).expanduser().is_dir():
        raise DataMissing(f"the data folder {found!r} does not exist: give --data DIR with cifar10/ or glue/rte/ in it")
    return None if found is None else str(Path(found).expanduser().resolve())


def tasks_in(data: str | None, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the wanted tasks whose files are in the folder; the embedded digits where there are none."""
    return tuple(task for task in wanted if data is not None and _has(data, task)) or ("digits",)


def _places(data: str, task: str) -> list[Path]:
    entry = tasks.entry(task)
    root = Path(data)
    own = root / entry.folder
    return [own, own / (entry.configuration or ""), own / "data", *([root] if entry.folder in root.name else [])]


def _has(data: str, task: str) -> bool:
    return any(next(place.glob("train*.parquet"), None) is not None for place in _places(data, task))


def _looked(data: str, task: str) -> str:
    return repr(str(_places(data, task)[0]))


def find_weights(lesson: Lesson, weights: str | None, data: str | None) -> str | None:
    """The folder with weights of the backbone's kind; None: it starts from random ones."""
    if weights is not None and not Path(weights).expanduser().is_dir():
        raise DataMissing(f"the weights folder {weights!r} does not exist; give a folder with config.json and weights")
    if lesson.kind is None:
        return None
    for root in (weights, data):
        if root is None:
            continue
        top = Path(root).expanduser().resolve()
        for place in (top, *sorted(one for one in top.iterdir() if one.is_dir())):
            if _kind_of(place) == lesson.kind and any(place.glob("*.safetensors")):
                return str(place)
    if weights is not None:
        raise DataMissing(
            f"the weights folder {weights!r} and those in it hold no {lesson.kind!r} for {lesson.model!r} "
            "(config.json with that model_type, beside *.safetensors)"
        )
    return None


def _kind_of(folder: Path) -> str | None:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content.get("model_type") if isinstance(content, dict) else None


def keep_samples(
    task: str, data: str | None, folder: Path, num_train: int | None, num_judged: int | None
) -> dict[str, Any]:
    """Some samples of a task, equally many of each class, as files below `folder`; how many there are, as JSON has it.

    Where all are wanted nothing is written; the digits are embedded, and always all of them.
    """
    from stagewright.zoo.tasks import table

    entry = tasks.entry(task)
    if not entry.folder:
        return {"kept": False, "train": None, "judged": None, "of": None}
    kept = num_train is not None or num_judged is not None
    counts, sizes = [], []
    for split, wanted in zip(entry.splits, (num_train, num_judged), strict=True):
        found = table.read(entry, split, Path(str(data)))
        sizes.append(found.num_rows)
        counts.append(min(found.num_rows, wanted or found.num_rows))
        if kept:
            from pyarrow import parquet

            chosen = found.take(sorted(_in_turn(found.column("label").to_numpy())[: counts[-1]]))
            place = folder / entry.folder
            place.mkdir(parents=True, exist_ok=True)
            parquet.write_table(chosen, place / f"{split}-00000-of-00001.parquet")
    return {"kept": kept, "train": counts[0], "judged": counts[1], "of": sizes}


def samples_folder(data: str | None, task: str, bench: Bench) -> str | None:
    """Where a part finds the samples of a task: some in the study's folder, or all where they were found."""
    return str((bench.folder / "samples").resolve()) if bench.results[f"data-{task}"]["kept"] else data


def _in_turn(labels: NDArray[Any]) -> list[int]:
    """The places of samples, one of each class after the other as long as there are some."""
    nth = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        mine = np.flatnonzero(labels == label)
        nth[mine] = np.arange(len(mine))
    return np.argsort(nth, kind="stable").tolist()  # type: ignore[no-any-return]
