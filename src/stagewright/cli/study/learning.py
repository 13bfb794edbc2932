"""What the commands of studies that train share: where data and weights are, how much is learned, how often."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.screen import note
from stagewright.cli.study.conduct import HOW, WHAT, words
from stagewright.errors import UsageError

__all__ = [
    "Epochs",
    "LearningRate",
    "Samples",
    "Size",
    "StudyData",
    "StudySeeds",
    "StudyWeights",
    "chosen_tasks",
    "samples_of",
]

StudyData = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="With cifar10/, glue/rte/ … as parquet. \\[default: STAGEWRIGHT_DATA, else the embedded digits]",
        rich_help_panel=WHAT,
        show_default=False,
    ),
]
StudyWeights = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        metavar="DIR",
        help="Pretrained backbones, in it or in its folders. \\[default: looked for in --data, else random]",
        rich_help_panel=WHAT,
        show_default=False,
    ),
]
Size = Annotated[
    int | None, typer.Option(min=1, help="Pixels a side, or tokens. \\[default: the task's]", rich_help_panel=WHAT)
]
Samples = Annotated[
    str | None,
    typer.Option(
        "--samples",
        metavar="N,N",
        help="To train on, to judge by. \\[default: all; quick: a few]",
        rich_help_panel=WHAT,
    ),
]
Epochs = Annotated[
    int | None, typer.Option(min=1, help="Passes over the samples. \\[default: 3; quick: 1]", rich_help_panel=WHAT)
]
LearningRate = Annotated[
    float | None, typer.Option("--learning-rate", help="Of AdamW. \\[default: the task's]", rich_help_panel=WHAT)
]
StudySeeds = Annotated[
    str | None, typer.Option("--seeds", help="One training each. \\[default: 0,1,2; quick: 0,1]", rich_help_panel=HOW)
]


def chosen_tasks(text: str | None, data: Path | None, wanted: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """The folder of data, and the tasks that were named, or those of the wanted ones that are in it."""
    from stagewright.studies.parts.training_recipe import data_folder, tasks_in

    folder = data_folder(data)
    named = words(text)
    if named is not None:
        return folder, named
    found = tasks_in(folder, wanted)
    if found == ("digits",):
        where = f"{folder} has none of {', '.join(wanted)}" if folder is not None else "no data was given"
        note(f"{where}: the embedded digits are learned instead, by digits-vit (--data DIR names a folder with more)")
    return folder, found


def samples_of(text: str | None) -> tuple[int | None, int | None]:
    """`320,300`: samples to train on and to judge by; one number is for both."""
    if text is None:
        return None, None
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)?", text.replace(" ", "")):
        raise UsageError(f"{text!r} is not two numbers of samples; write like 320,300: to train on, to judge by")
    first, _, second = text.replace(" ", "").partition(",")
    return int(first), int(second or first)
