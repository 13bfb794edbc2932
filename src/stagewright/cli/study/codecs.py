"""``stagewright study codecs``: what crosses the links, and what each codec makes of its bytes, time and accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.options import Json
from stagewright.cli.study.conduct import (
    HOW,
    WHAT,
    Fresh,
    Quick,
    Resume,
    Root,
    StudyDevices,
    conduct,
    devices_of,
    whole_numbers,
    words,
)
from stagewright.cli.study.learning import (
    LearningRate,
    Samples,
    Size,
    StudyData,
    StudySeeds,
    StudyWeights,
    chosen_tasks,
    samples_of,
)

__all__ = ["codecs"]


def codecs(
    context: typer.Context,
    tasks: Annotated[
        str | None,
        typer.Option(help="\\[default: those of cifar10,rte,cola in --data, else digits]", rich_help_panel=WHAT),
    ] = None,
    data: StudyData = None,
    weights: StudyWeights = None,
    codecs: Annotated[
        str | None,
        typer.Option(
            help="FORWARD or FORWARD/BACKWARD, with commas. \\[default: none, bf16, ours, sort at 16/12/8/4 bits]",
            rich_help_panel=WHAT,
        ),
    ] = None,
    size: Size = None,
    batch: Annotated[
        int | None,
        typer.Option(min=2, help="Samples in a step. \\[default: the task's; quick: 16]", rich_help_panel=WHAT),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Of a batch. \\[default: 4; quick: 2]", rich_help_panel=WHAT)
    ] = None,
    samples: Samples = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Passes over the samples; 0: bytes, errors and rates alone. \\[default: 3; quick: 1]",
            rich_help_panel=WHAT,
        ),
    ] = None,
    learning_rate: LearningRate = None,
    seeds: StudySeeds = None,
    one_process: Annotated[
        bool | None,
        typer.Option(
            "--one-process/--pipeline",
            help="Train in one process, or by two workers. \\[default: pipeline; quick: one process]",
            rich_help_panel=HOW,
            show_default=False,
        ),
    ] = None,
    devices: StudyDevices = None,
    quick: Quick = False,
    resume: Resume = None,
    fresh: Fresh = False,
    root: Root = Path("studies"),
    json: Json = False,
) -> None:
    """The ablation of codecs on real data: true ratio, accuracy over seeds, bytes, honest transfer rate."""
    if resume is None:
        folder, chosen = chosen_tasks(tasks, data, ("cifar10",) if quick else ("cifar10", "rte", "cola"))
    else:
        folder, chosen = None, ()
    train, judged = samples_of(samples)
    given = {
        "tasks": chosen,
        "data": folder,
        "weights": str(weights.resolve()) if weights is not None else None,
        "codecs": words(codecs),
        "size": size,
        "batch": batch,
        "microbatches": microbatches,
        "train_samples": train,
        "judged_samples": judged,
        "epochs": epochs,
        "learning_rate": learning_rate,
        "seeds": whole_numbers(seeds, "seeds"),
        "how": None if one_process is None else "one-process" if one_process else "pipeline",
        "devices": None if resume is not None else devices_of(devices, 2),
    }
    conduct(context, given, quick=quick, resume=resume, fresh=fresh, root=root, json=json)
