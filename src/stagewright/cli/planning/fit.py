"""``stagewright fit``: the largest model, batch or sequence that fits in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli import options as opt
from stagewright.cli.planning.options import Analytic
from stagewright.cli.screen import SCREEN, note, print_json, print_lines, print_table


def fit(
    model: opt.ModelName,
    memory: Annotated[str, typer.Option(help="Memory of each device, like 8GiB.")],
    devices: Annotated[int, typer.Option(min=1, help="How many devices.")] = 2,
    what: Annotated[
        str | None,
        typer.Option(help="batch, layers or sequence. \\[default: layers where their number is free, else batch]"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Global batch, where layers or tokens grow.")] = 8,
    microbatches: Annotated[int, typer.Option(min=1, help="Micro-batches of a pipeline.")] = 4,
    schedule: Annotated[str, typer.Option(help="Schedule of a pipeline.")] = "1f1b",
    optimizer: Annotated[str, typer.Option(help="sgd, adam or adamw.")] = "adamw",
    check: Annotated[
        bool, typer.Option("--check", help="Run the best strategy at its limit and just above it.")
    ] = False,
    analytic: Analytic = False,
    root: Annotated[Path, typer.Option(help="Where run folders of --check go.")] = Path("runs"),
    json: opt.Json = False,
    image_size: opt.ImageSize = None,
    sequence_length: opt.SequenceLength = None,
    num_classes: opt.NumClasses = None,
    dtype: opt.RunDtype = None,
    seed: opt.Seed = 0,
    units: opt.Units = "auto",
    cache_dir: opt.CacheDir = None,
) -> None:
    """Find the most layers, samples or tokens that fit, for each strategy, with and without checkpointing."""
    from stagewright.api.fit import fit as find_sizes

    result = find_sizes(
        model,
        memory,
        devices=devices,
        what=what,  # type: ignore[arg-type]  # checked there
        batch=batch,
        microbatches=microbatches,
        schedule=schedule,
        optimizer=optimizer,
        check=check,
        analytic=analytic,
        cache=cache_dir or True,
        root=root,
        progress=SCREEN,
        image_size=image_size,
        sequence_length=sequence_length,
        num_classes=num_classes,
        seed=seed,
        units=units,
        dtype=dtype or "float32",
    )
    if json:
        print_json(result.to_dict())
        return
    print_table(result.table())
    for text in result.notes:
        note(text)
    for run in result.checked or ():
        print_lines(f"{run['plan']}: {'ran' if run['ran'] else 'did not fit'} ({run['text']})")
