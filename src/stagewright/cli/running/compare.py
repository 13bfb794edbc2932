"""``stagewright compare``: run one batch of a model under each strategy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli import options as opt
from stagewright.cli.screen import SCREEN, note, print_json, print_lines, print_table
from stagewright.codecs.registry import check_codec
from stagewright.engine.launch.fork_server import start_fork_server
from stagewright.quantity import parse_bytes
from stagewright.spec.optimizers import DEFAULT_OPTIMIZER
from stagewright.zoo.named import catalog
from stagewright.zoo.validation import check_name

if TYPE_CHECKING:
    from stagewright.api.compare import Comparison

_BATCH = 32


def compare(
    model: opt.ModelName,
    devices: opt.Devices = "2",
    strategy: Annotated[
        list[str] | None,
        opt.run_option(
            metavar="NAMES|MESH",
            help="Strategy; serial, data, fsdp, hsdp, zero1, zero2, tensor, pipeline, expert, context; or a mesh: "
            "dp=2,pp=2. \\[default: serial,data,tensor,pipeline]",
        ),
    ] = None,
    batch: Annotated[int | None, opt.run_option(min=1, help="Global batch: samples in a step. \\[default: 32]")] = None,
    microbatches: Annotated[int | None, opt.microbatches_option("8 in a pipeline")] = None,
    micro_batch_size: opt.PlanMicroBatchSize = None,
    schedule: opt.Schedule = "1f1b",
    policy: opt.Policy = "optimal",
    cut: opt.Cut = None,
    recompute: opt.Recompute = "none",
    offload: opt.Offload = "none",
    shard: opt.Shard = False,
    fsdp_shards: opt.FSDPShards = None,
    fsdp_gather: opt.FSDPGather = "auto",
    zero: opt.Zero = 0,
    vocab_parallel: opt.VocabParallel = False,
    sequence_parallel: opt.SequenceParallel = False,
    speeds: opt.Speeds = None,
    context_attention: opt.ContextAttention = "ring",
    optimizer: opt.Optimizer = DEFAULT_OPTIMIZER,
    codec: opt.Codec = "none",
    codec_backward: Annotated[
        str | None, opt.run_option("--codec-backward", metavar="NAME", help="For gradients. \\[default: as --codec]")
    ] = None,
    inference: Annotated[bool, opt.run_option("--inference", help="Forward only; as a stream of batches.")] = False,
    memory: opt.Memory = None,
    steps: Annotated[int, opt.run_option(min=1, help="Timed steps.")] = 10,
    warmup: Annotated[int, opt.run_option(min=0, help="Warm-up; untimed steps.")] = 3,
    rounds: Annotated[int, opt.run_option(min=1, help="Repeat every run this many times; interleaved.")] = 1,
    batch_norm: opt.BatchNorm = "plain",
    baseline: opt.Baseline = "auto",
    hang_s: opt.Timeout = 300.0,
    root: opt.Root = Path("runs"),
    json: opt.Json = False,
    weights: opt.Weights = None,
    image_size: opt.ImageSize = None,
    sequence_length: opt.SequenceLength = None,
    num_classes: opt.NumClasses = None,
    precision: opt.Precision = None,
    compile: opt.Compile = None,
    optimizer_in_backward: opt.OptimizerInBackward = False,
    cuda_graphs: opt.CudaGraphs = False,
    seed: opt.Seed = 0,
    units: opt.Units = "auto",
) -> None:
    """Run one batch under each strategy, verify each against the single-device baseline, and compare them."""
    check_name(model, weights)
    for name in (codec, codec_backward):
        if name is not None:
            check_codec(name)
    opt.check_microbatches(microbatches, micro_batch_size)
    start_fork_server()
    from stagewright.api.compare import DEFAULT_STRATEGIES, compare as run

    if batch is None and catalog.is_factory(model):
        note(f"a step has {_BATCH} samples, as --batch is not given: those of {model}'s example, repeated or cut")
    comparison = run(
        model,
        devices=devices or 2,
        strategies=" ".join(strategy) if strategy else DEFAULT_STRATEGIES,
        batch=_BATCH if batch is None else batch,
        microbatches=microbatches or 8,
        micro_batch_size=micro_batch_size,
        optimizer=optimizer,
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
        cuts=opt.unit_names(cut),
        units=units,
        recompute=opt.parse_mode_or_units(recompute),
        offload=opt.parse_mode_or_units(offload),
        shard=shard,
        fsdp_shards=fsdp_shards,
        fsdp_gather=fsdp_gather,
        zero=zero,
        vocab_parallel=vocab_parallel,
        sequence_parallel=sequence_parallel,
        speeds=opt.parse_speeds(speeds),
        context_attention=context_attention,
        codec=codec,
        codec_backward=codec_backward,
        training=not inference,
        memory_bytes=parse_bytes(memory) if memory else None,
        steps=steps,
        warmup=warmup,
        batch_norm=batch_norm,
        baseline=baseline,
        precision=precision or "float32",
        compile=compile or "none",
        optimizer_in_backward=optimizer_in_backward,
        cuda_graphs=cuda_graphs,
    )
    show_comparison(comparison, json=json, headline=True)


def show_comparison(comparison: Comparison, *, json: bool, headline: bool) -> None:
    """Print the runs; exit with 1 where one failed, with 3 where one did not pass its parity check."""
    from stagewright.report.headline import compare_headline
    from stagewright.report.tables.compare import compare_remarks, comparison_table, failure_tracebacks

    rows = comparison.rows
    if json:
        print_json(comparison.to_dict())
    else:
        print_table(comparison_table(comparison))
        print_lines(*compare_remarks(rows))
        answer = compare_headline(rows) if headline else ()
        if answer:
            print_lines("", *answer)
        for text in failure_tracebacks(rows):
            note(text)
    if any(row.error is not None and not row.refused for row in rows):
        raise typer.Exit(1)
    if any(row.equal is False for row in rows):
        raise typer.Exit(3)
