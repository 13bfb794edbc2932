"""``stagewright train``: train a model on a task, under a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.options import ImageSize, Json, ModelName, SequenceLength, Units, Weights
from stagewright.cli.screen import SCREEN, print_json, print_table
from stagewright.engine.launch.fork_server import start_fork_server
from stagewright.errors import UsageError
from stagewright.zoo import tasks
from stagewright.zoo.validation import check_name

_HOW = "How it runs"
_LEARN = "Training"
_KEEP = "Files"


def train(
    model: ModelName,
    task: Annotated[
        str, typer.Argument(metavar="TASK", help=f"One of {', '.join(tasks.names())}.", show_default=False)
    ],
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A plan.toml; options override it.", rich_help_panel=_HOW),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Like data=2,pipeline=2. \\[default: serial]", rich_help_panel=_HOW)
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            min=1, help="Micro-batches of each replica. \\[default: 4 in a pipeline, else 1]", rich_help_panel=_HOW
        ),
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Schedule of a pipeline. \\[default: 1f1b]", rich_help_panel=_HOW)
    ] = None,
    cut: Annotated[list[str] | None, typer.Option(help="Cut after this unit.", rich_help_panel=_HOW)] = None,
    recompute: Annotated[
        str | None, typer.Option(help="Activation checkpointing: none, always, except-last.", rich_help_panel=_HOW)
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(help="On a pipeline's links: a codec, auto, or your module:Class.", rich_help_panel=_HOW),
    ] = None,
    shard: Annotated[bool, typer.Option("--shard", help="Data parallel with FSDP2.", rich_help_panel=_HOW)] = False,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.", rich_help_panel=_HOW)] = None,
    devices: Annotated[
        str | None,
        typer.Option(help="How many (one GPU or core each), or names: cpu:0,cpu:1.", rich_help_panel=_HOW),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="\\[default: 3]", rich_help_panel=_LEARN)] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Global batch: samples in a step. \\[default: 64]", rich_help_panel=_LEARN)
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="sgd, adam or adamw. \\[default: adamw]", rich_help_panel=_LEARN)
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", help="\\[default: 0.001]", rich_help_panel=_LEARN)
    ] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of sgd.", rich_help_panel=_LEARN)] = None,
    weight_decay: Annotated[float | None, typer.Option("--weight-decay", rich_help_panel=_LEARN)] = None,
    clip: Annotated[
        float | None,
        typer.Option(help="Clip gradients to this global norm.", rich_help_panel=_LEARN),
    ] = None,
    batch_norm: Annotated[
        str | None, typer.Option(help="Statistics by micro-batch (plain) or batch (deferred).", rich_help_panel=_LEARN)
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="One run a seed, with commas: 0,1,2. \\[default: 0, or the plan's]", rich_help_panel=_LEARN),
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option("--checkpoint-every", min=1, help="Steps between checkpoints.", rich_help_panel=_KEEP)
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue from the latest matching checkpoint under --root.", rich_help_panel=_KEEP
        ),
    ] = False,
    start: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Start from this run or checkpoint.", rich_help_panel=_KEEP),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write the trained weights here, as model.safetensors.", rich_help_panel=_KEEP
        ),
    ] = None,
    root: Annotated[Path, typer.Option(help="Where run folders go.", rich_help_panel=_KEEP)] = Path("runs"),
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="A folder of parquet files.", rich_help_panel=_KEEP)
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder with tokenizer.json.", rich_help_panel=_KEEP)
    ] = None,
    json: Json = False,
    weights: Weights = None,
    image_size: ImageSize = None,
    sequence_length: SequenceLength = None,
    units: Units = "auto",
) -> None:
    """Train a model on a task, with checkpoints and an evaluation after each epoch."""
    check_name(model, weights)
    tasks.entry(task)
    start_fork_server()
    from stagewright.api.train import train as run

    result = run(
        model,
        task,
        plan=plan,
        devices=devices,
        seeds=_parse_seeds(seeds),
        resume=resume,
        start=start,
        export=export,
        data_dir=data_dir,
        tokenizer=tokenizer,
        root=root,
        progress=SCREEN,
        weights=weights,
        image_size=image_size,
        sequence_length=sequence_length,
        mesh=mesh,
        microbatches=microbatches,
        schedule=schedule,
        cuts=tuple(cut) if cut else None,
        recompute=recompute,
        shard=shard or None,
        codec=codec,
        dtype=dtype,
        epochs=epochs,
        batch=batch,
        clip=clip,
        batch_norm=batch_norm,
        checkpoint_every=checkpoint_every,
        units=units if units != "auto" else None,
        optimizer=optimizer,
        learning_rate=learning_rate,
        momentum=momentum,
        weight_decay=weight_decay,
    )
    if json:
        print_json(result.to_dict())
    else:
        print_table(result.table())


def _parse_seeds(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r} is not a list of seeds; write whole numbers with commas, like 0,1,2") from None
