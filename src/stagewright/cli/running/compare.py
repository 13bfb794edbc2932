"""``stagewright compare``: run one batch of a model under each strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.options import (
    ImageSize,
    Json,
    ModelName,
    NumClasses,
    RunDtype,
    Seed,
    SequenceLength,
    Units,
    Weights,
)
from stagewright.cli.screen import SCREEN, note, print_json, print_lines, print_table
from stagewright.codecs.registry import check_codec
from stagewright.engine.launch.fork_server import start_fork_server
from stagewright.quantity import parse_bytes
from stagewright.schedules.rules import SCHEDULES
from stagewright.spec.plan_rules import BATCH_NORMS, DTYPES, RECOMPUTES, check_choice
from stagewright.zoo.named import catalog
from stagewright.zoo.validation import check_name

_RUN = "How it runs"
_BATCH = 32


def compare(
    model: ModelName,
    devices: Annotated[
        str, typer.Option(help="How many (one GPU or core each), or names: cpu:0,cpu:1.", rich_help_panel=_RUN)
    ] = "2",
    strategies: Annotated[
        str,
        typer.Option(
            help="Names with commas, meshes after spaces: 'serial,data data=2,pipeline=2'.", rich_help_panel=_RUN
        ),
    ] = "serial,data,tensor,pipeline",
    batch: Annotated[
        int | None, typer.Option(min=1, help="Global batch: samples in a step. \\[default: 32]", rich_help_panel=_RUN)
    ] = None,
    microbatches: Annotated[int, typer.Option(min=1, help="Micro-batches of a pipeline.", rich_help_panel=_RUN)] = 8,
    schedule: Annotated[str, typer.Option(help="Schedule of a pipeline.", rich_help_panel=_RUN)] = "1f1b",
    policy: Annotated[
        str, typer.Option(help="Where a pipeline is cut; yours is module:function.", rich_help_panel=_RUN)
    ] = "optimal",
    cut: Annotated[list[str] | None, typer.Option(help="Cut after this unit.", rich_help_panel=_RUN)] = None,
    recompute: Annotated[
        str, typer.Option(help="Activation checkpointing: none, always, except-last.", rich_help_panel=_RUN)
    ] = "none",
    shard: Annotated[bool, typer.Option("--shard", help="Data parallel with FSDP2.", rich_help_panel=_RUN)] = False,
    codec: Annotated[
        str, typer.Option(help="On a pipeline's links: a codec, auto, or your module:Class.", rich_help_panel=_RUN)
    ] = "none",
    codec_backward: Annotated[
        str | None,
        typer.Option("--codec-backward", help="For gradients. \\[default: as --codec]", rich_help_panel=_RUN),
    ] = None,
    inference: Annotated[
        bool, typer.Option("--inference", help="Forward only, as a stream of batches.", rich_help_panel=_RUN)
    ] = False,
    memory: Annotated[
        str | None, typer.Option(help="Memory limit of each device, like 2GiB.", rich_help_panel=_RUN)
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.", rich_help_panel=_RUN)] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Warm-up steps.", rich_help_panel=_RUN)] = 3,
    rounds: Annotated[
        int,
        typer.Option(
            min=1, help="Repeat all strategies, interleaved; speed-ups are medians over rounds.", rich_help_panel=_RUN
        ),
    ] = 1,
    batch_norm: Annotated[
        str, typer.Option(help="Statistics by micro-batch (plain) or batch (deferred).", rich_help_panel=_RUN)
    ] = "plain",
    hang_s: Annotated[
        float, typer.Option(min=1, help="End a run without progress after this many seconds.", rich_help_panel=_RUN)
    ] = 300.0,
    root: Annotated[Path, typer.Option(help="Where run folders go.", rich_help_panel=_RUN)] = Path("runs"),
    json: Json = False,
    weights: Weights = None,
    image_size: ImageSize = None,
    sequence_length: SequenceLength = None,
    num_classes: NumClasses = None,
    dtype: RunDtype = None,
    seed: Seed = 0,
    units: Units = "auto",
) -> None:
    """Run one batch under each strategy, verify each against the single-device baseline, and compare them."""
    check_name(model, weights)
    check_choice("schedule", schedule, SCHEDULES)
    check_choice("recompute mode", recompute, RECOMPUTES)
    check_choice("batch norm mode", batch_norm, BATCH_NORMS)
    check_choice("dtype", dtype or "float32", DTYPES)
    for name in (codec, codec_backward):
        if name is not None:
            check_codec(name)
    start_fork_server()
    from stagewright.api.compare import compare as run
    from stagewright.report.tables.compare import compare_remarks, failure_tracebacks

    if batch is None and catalog.is_factory(model):
        note(f"a step has {_BATCH} samples (set another number with --batch): rows of {model}'s example are repeated")
    comparison = run(
        model,
        devices=devices,
        strategies=strategies,
        batch=_BATCH if batch is None else batch,
        microbatches=microbatches,
        rounds=rounds,
        root=root,
        hang_s=hang_s,
        progress=SCREEN,
        weights=weights,
        image_size=image_size,
        sequence_length=sequence_length,
        num_classes=num_classes,
        seed=seed,
        schedule=schedule,
        split=policy,
        cuts=tuple(cut or ()),
        units=units,
        recompute=recompute,
        shard=shard,
        codec=codec,
        codec_backward=codec_backward,
        training=not inference,
        memory_bytes=parse_bytes(memory) if memory else None,
        steps=steps,
        warmup=warmup,
        batch_norm=batch_norm,
        dtype=dtype or "float32",
    )
    rows = comparison.rows
    if json:
        print_json(comparison.to_dict())
    else:
        print_table(comparison.table())
        print_lines(*compare_remarks(rows))
        for text in failure_tracebacks(rows):
            note(text)
    if any(row.error is not None and not row.refused for row in rows):
        raise typer.Exit(1)
    if any(row.equal is False for row in rows):
        raise typer.Exit(3)
