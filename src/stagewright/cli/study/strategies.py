"""``stagewright study strategies``: pipeline against data parallel, trained for real; and large batches."""

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
    Epochs,
    LearningRate,
    Samples,
    Size,
    StudyData,
    StudySeeds,
    StudyWeights,
    chosen_tasks,
    samples_of,
)
from stagewright.quantity import parse_bytes

__all__ = ["strategies"]


def strategies(
    context: typer.Context,
    tasks: Annotated[
        str | None,
        typer.Option(help="\\[default: those of cifar10,rte in --data, else digits]", rich_help_panel=WHAT),
    ] = None,
    data: StudyData = None,
    weights: StudyWeights = None,
    workers: Annotated[str | None, typer.Option(help="\\[default: 2,4; quick: 2]", rich_help_panel=WHAT)] = None,
    microbatches: Annotated[
        str | None, typer.Option(help="Of pipelines. \\[default: 2,4,8; quick: 4]", rich_help_panel=WHAT)
    ] = None,
    cuts: Annotated[
        str | None, typer.Option(help="\\[default: even,client; quick: even]", rich_help_panel=WHAT)
    ] = None,
    size: Size = None,
    batch: Annotated[
        int | None,
        typer.Option(min=2, help="Of 2 workers; 4 take twice that. \\[default: the task's]", rich_help_panel=WHAT),
    ] = None,
    samples: Samples = None,
    epochs: Epochs = None,
    learning_rate: LearningRate = None,
    batch_norm: Annotated[
        str | None,
        typer.Option(
            help="Running statistics move with the whole batch (deferred) or with each piece (plain). "
            "\\[default: deferred]",
            rich_help_panel=WHAT,
        ),
    ] = None,
    large_batches: Annotated[
        str | None,
        typer.Option("--large-batches", help="\\[default: 256,1024,4096; quick: 48,96; 0: none]", rich_help_panel=WHAT),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(
            "--memory",
            help="Of each device, for large batches. \\[default: between data parallel's two largest]",
            rich_help_panel=WHAT,
        ),
    ] = None,
    seeds: StudySeeds = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Times that speeds are measured. \\[default: 3; quick: 1]", rich_help_panel=HOW),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Timed steps of a run. \\[default: 5; quick: 3]", rich_help_panel=HOW)
    ] = None,
    devices: StudyDevices = None,
    quick: Quick = False,
    resume: Resume = None,
    fresh: Fresh = False,
    root: Root = Path("studies"),
    json: Json = False,
) -> None:
    """Pipeline against data parallel on 2 and 4 workers: accuracy over seeds, throughput, speed-up; large batches."""
    numbers = whole_numbers(workers, "numbers of workers")
    large = whole_numbers(large_batches, "batches")
    if resume is None:
        folder, chosen = chosen_tasks(tasks, data, ("cifar10",) if quick else ("cifar10", "rte"))
    else:
        folder, chosen = None, ()
    train, judged = samples_of(samples)
    given = {
        "tasks": chosen,
        "data": folder,
        "weights": str(weights.resolve()) if weights is not None else None,
        "workers": numbers,
        "microbatches": whole_numbers(microbatches, "micro-batches"),
        "cuts": words(cuts),
        "size": size,
        "batch": batch,
        "train_samples": train,
        "judged_samples": judged,
        "epochs": epochs,
        "learning_rate": learning_rate,
        "batch_norm": batch_norm,
        "large_batches": () if large == (0,) else large,
        "memory_bytes": parse_bytes(limit) if limit is not None else None,
        "seeds": whole_numbers(seeds, "seeds"),
        "rounds": rounds,
        "steps": steps,
        "devices": None if resume is not None else devices_of(devices, max(numbers or (4,))),
    }
    conduct(context, given, quick=quick, resume=resume, fresh=fresh, root=root, json=json)
