"""Options that the studies which train share: tasks, data, weights, samples, epochs and seeds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from stagewright.errors import DataMissing, UsageError
from stagewright.studies.framework.options import Note, option, parse_numbers, parse_words, setting
from stagewright.studies.parts.devices import choose_devices, devices_option
from stagewright.studies.parts.training_recipe import TrainingRecipe, choose_recipe, data_folder, tasks_in


def parse_samples(text: str) -> tuple[int, int]:
    """Read `320,300` as training and evaluation samples; one number is used for both."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)?", text.replace(" ", "")):
        raise UsageError(f"{text!r} is not two numbers of samples; write like 320,300: for training, for evaluation")
    first, _, second = text.replace(" ", "").partition(",")
    return int(first), int(second or first)


def samples_option(**quick: int) -> Any:
    """Declare --samples, which sets `train_samples` and `judged_samples`."""
    return option(
        None,
        "How many samples; for training and for evaluation.",
        flag="--samples",
        metavar="N,N",
        parse=parse_samples,
        also=("judged_samples",),
        show=lambda counts: ",".join(map(str, counts)),
        default_text="all",
        **quick,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """What a study trains; studies add their own options and defaults."""

    FULL_TASKS: ClassVar[tuple[str, ...]] = ("cifar10", "rte")

    tasks: tuple[str, ...] = option(
        ("digits",),
        "cifar10, rte, cola or digits, each with its own backbone.",
        parse=parse_words,
        default_text="the tasks found in --data-dir, else digits",
    )
    data: str | None = option(
        None,
        "A folder of parquet files; in cifar10/, glue/rte/ …",
        flag="--data-dir",
        metavar="DIR",
        default_text="$STAGEWRIGHT_DATA, else the embedded digits",
    )
    weights: str | None = option(
        None,
        "A folder of safetensors files; pretrained backbones, also in subfolders.",
        metavar="DIR",
        parse=lambda text: str(Path(text).resolve()),
        default_text="searched in --data-dir, else random weights",
    )
    quick: bool = setting(False)
    seeds: tuple[int, ...] = option(
        (0, 1, 2), "Seeds, with commas; one run each.", parse=parse_numbers, quick=(0, 1), panel="Execution"
    )
    train_samples: int | None = samples_option()
    judged_samples: int | None = setting(None)
    epochs: int = option(3, "Passes over the samples.", minimum=1, quick=1)
    batch: int | None = option(
        None, "Global batch: samples in a step.", typed=int, minimum=2, default_text="the task's"
    )
    learning_rate: float | None = option(None, "Learning rate; of AdamW.", typed=float, default_text="the task's")
    size: int | None = option(
        None, "Image size in pixels, or tokens per sample.", typed=int, minimum=1, default_text="the task's"
    )
    devices: tuple[str, ...] = devices_option("all GPUs")
    """One device per worker."""

    @property
    def recipes(self) -> dict[str, TrainingRecipe]:
        return {task: self.recipe(task) for task in self.tasks}

    def recipe(self, task: str) -> TrainingRecipe:
        """How a task is trained."""
        return choose_recipe(
            task,
            data=self.data,
            weights=self.weights,
            quick=self.quick,
            size=self.size,
            batch=self.batch,
            learning_rate=self.learning_rate,
        )

    @classmethod
    def most_devices(cls, given: Mapping[str, Any]) -> int:
        """How many devices the study can use."""
        return 2

    @classmethod
    def machine_defaults(cls, given: Mapping[str, Any], *, quick: bool, note: Note) -> dict[str, Any]:
        """Choose what was not given: tasks by the data that exists, devices by this machine."""
        tasks: tuple[str, ...]
        if quick and given.get("tasks") is None:
            # Of the tasks only this one is learned within a quick study: the others would compare guesses.
            data, tasks = data_folder(given.get("data")), ("digits",)
            found: tuple[str, ...] = ()
            if given.get("data") is not None:  # refused if it has none of the tasks, even one level lower
                data, found = choose_tasks(None, given["data"], cls.FULL_TASKS, note)
            others = f"; for the data in {data}: --tasks {','.join(found)}" if found else " (--tasks: others)"
            note(f"quick: training digits-vit on the embedded digits, which it can learn in this time{others}")
        else:
            data, tasks = choose_tasks(given.get("tasks"), given.get("data"), cls.FULL_TASKS, note)
        devices = given.get("devices") or choose_devices(cls.most_devices(given))
        return {"data": data, "tasks": tasks, "devices": devices}


def choose_tasks(
    named: tuple[str, ...] | None, data: str | None, wanted: tuple[str, ...], note: Note
) -> tuple[str | None, tuple[str, ...]]:
    """Return the data folder, and the tasks that were named or those of the wanted ones that are in it."""
    folder = data_folder(data)
    if named is not None:
        return folder, named
    tasks = tasks_in(folder, wanted)
    if tasks == ("digits",) and folder is not None:
        # A folder one level too high is a slip, not a wish for other data.
        below = [child for child in sorted(Path(folder).iterdir()) if child.is_dir()]
        usable = [child for child in below if tasks_in(str(child), wanted) != ("digits",)]
        if len(usable) == 1:
            note(f"{folder} has none of {', '.join(wanted)}, but {usable[0].name} in it has: using {usable[0]}")
            return str(usable[0]), tasks_in(str(usable[0]), wanted)
        if data is not None:
            raise DataMissing(
                f"--data-dir {data} has none of {', '.join(wanted)}: name the folder with cifar10/ or glue/rte/ in it, "
                "or leave --data-dir out and add --tasks digits to train on the embedded digits"
            )
    if tasks == ("digits",):
        reason = f"{folder} has none of {', '.join(wanted)}" if folder is not None else "no data was given"
        note(f"{reason}: training digits-vit on the embedded digits instead (--data-dir DIR names another folder)")
    return folder, tasks
