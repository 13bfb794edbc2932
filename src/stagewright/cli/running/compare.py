"""``stagewright compare``: run one batch of a model under each strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli import options as opt
from stagewright.cli.screen import SCREEN, note, print_json, print_lines, print_table
from stagewright.codecs.registry import check_codec
from stagewright.engine.launch.fork_server import start_fork_server
from stagewright.quantity import parse_bytes
from stagewright.schedules.rules import SCHEDULES
from stagewright.spec.plan_rules import BATCH_NORMS, DTYPES, RECOMPUTES, check_choice
from stagewright.zoo.named import catalog
from stagewright.zoo.validation import check_name

_run_option = opt.panel("How it runs")
_BATCH = 32


def compare(
    model: opt.ModelName,
    devices: Annotated[str, _run_option(help="How many (one GPU or core each), or names: cpu:0,cpu:1.")] = "2",
    strategies: Annotated[
        str, _run_option(help="Names with commas, meshes after spaces: 'serial,data data=2,pipeline=2'.")
    ] = "serial,data,tensor,pipeline",
    batch: Annotated[int | None, _run_option(min=1, help="Global batch: samples in a step. \\[default: 32]")] = None,
    microbatches: Annotated[int, _run_option(min=1, help="Micro-batches of a pipeline.")] = 8,
    schedule: Annotated[str, _run_option(help="Schedule of a pipeline.")] = "1f1b",
    policy: Annotated[str, _run_option(help="Where a pipeline is cut; yours is module:function.")] = "optimal",
    cut: Annotated[list[str] | None, _run_option(help="Cut after this unit.")] = None,
    recompute: Annotated[str, _run_option(help="Activation checkpointing: none, always, except-last.")] = "none",
    shard: Annotated[bool, _run_option("--shard", help="Data parallel with FSDP2.")] = False,
    codec: Annotated[str, _run_option(help="On a pipeline's links: a codec, auto, or your module:Class.")] = "none",
    codec_backward: Annotated[
        str | None, _run_option("--codec-backward", help="For gradients. \\[default: as --codec]")
    ] = None,
    inference: Annotated[bool, _run_option("--inference", help="Forward only, as a stream of batches.")] = False,
    memory: Annotated[str | None, _run_option(help="Memory limit of each device, like 2GiB.")] = None,
    steps: Annotated[int, _run_option(min=1, help="Timed steps.")] = 10,
    warmup: Annotated[int, _run_option(min=0, help="Warm-up steps.")] = 3,
    rounds: Annotated[
        int, _run_option(min=1, help="Repeat all strategies, interleaved; speed-ups are medians over rounds.")
    ] = 1,
    batch_norm: Annotated[str, _run_option(help="Statistics by micro-batch (plain) or batch (deferred).")] = "plain",
    hang_s: Annotated[float, _run_option(min=1, help="End a run without progress after this many seconds.")] = 300.0,
    root: Annotated[Path, _run_option(help="Where run folders go.")] = Path("runs"),
    json: opt.Json = False,
    weights: opt.Weights = None,
    image_size: opt.ImageSize = None,
    sequence_length: opt.SequenceLength = None,
    num_classes: opt.NumClasses = None,
    dtype: opt.RunDtype = None,
    seed: opt.Seed = 0,
    units: opt.Units = "auto",
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
    from stagewright.report.headline import compare_headline
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
        answer = compare_headline(rows)
        if answer:
            print_lines("", *answer)
        for text in failure_tracebacks(rows):
            note(text)
    if any(row.error is not None and not row.refused for row in rows):
        raise typer.Exit(1)
    if any(row.equal is False for row in rows):
        raise typer.Exit(3)
