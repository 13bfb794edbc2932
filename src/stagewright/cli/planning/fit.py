"""``stagewright fit``: the largest model, batch or sequence that fits in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from stagewright.cli import options as opt
from stagewright.cli.planning.options import Analytic, analytic_option
from stagewright.cli.screen import SCREEN, note, print_json, print_lines, print_table
from stagewright.spec.optimizers import DEFAULT_OPTIMIZER


def fit(
    model: opt.ModelName,
    memory: Annotated[
        str | None,
        opt.run_option(
            metavar="SIZE", help="Memory limit of each device, like 2GiB; needed without --cluster.", show_default=False
        ),
    ] = None,
    devices: Annotated[
        int | None, opt.run_option(min=1, help="How many devices. \\[default: 2, or all of the cluster's]")
    ] = None,
    cluster: Annotated[
        Path | None,
        analytic_option(
            "--cluster",
            metavar="FILE|NAME",
            help="A cluster file, or a name like 8xh100 or 32x8xa100; with --analytic.",
        ),
    ] = None,
    what: Annotated[
        str | None,
        opt.choice(
            "size",
            ("batch", "layers", "sequence"),
            opt.run_option,
            help="What grows. \\[default: layers where their number is free, else batch]",
        ),
    ] = None,
    batch: Annotated[int, opt.run_option(min=1, help="Global batch: samples in a step; if layers or tokens grow.")] = 8,
    microbatches: Annotated[int, opt.microbatches_option("4 in a pipeline")] = 4,
    schedule: opt.Schedule = "1f1b",
    optimizer: opt.Optimizer = DEFAULT_OPTIMIZER,
    verify: Annotated[bool, opt.run_option("--verify", help="Run the best; at its limit and above it.")] = False,
    analytic: Analytic = False,
    root: opt.Root = Path("runs"),
    json: opt.Json = False,
    image_size: opt.ImageSize = None,
    sequence_length: opt.SequenceLength = None,
    num_classes: opt.NumClasses = None,
    precision: opt.Precision = "float32",
    seed: opt.Seed = 0,
    units: opt.Units = "auto",
    cache_dir: opt.CacheDir = None,
) -> None:
    """Find the most layers, samples or tokens that fit, for each strategy, with and without checkpointing."""
    from stagewright.api.fit import fit as find_sizes

    if not analytic:
        opt.announce_cpu()
    result = find_sizes(
        model,
        memory,
        devices=devices,
        cluster=cluster,
        what=what,  # type: ignore[arg-type]  # checked there
        batch=batch,
        microbatches=microbatches,
        schedule=schedule,
        optimizer=optimizer,
        check=verify,
        analytic=analytic,
        cache=cache_dir or True,
        root=root,
        progress=SCREEN,
        image_size=image_size,
        sequence_length=sequence_length,
        num_classes=num_classes,
        seed=seed,
        units=units,
        precision=precision,
    )
    if json:
        print_json(result.to_dict())
        return
    print_table(result.table())
    for text in result.notes:
        note(text)
    for run in result.checked or ():
        print_lines(f"{run['plan']}: {'ran' if run['ran'] else 'did not fit'} ({run['text']})")
