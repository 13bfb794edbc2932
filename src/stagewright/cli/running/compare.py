"""``stagewright compare``: the same batch of the same model under each strategy, for real."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    devices_of,
)
from stagewright.cli.screen import note, print_json, screen
from stagewright.codecs.name import check_codec
from stagewright.engine.launch.fork_server import begin_importing
from stagewright.errors import UsageError
from stagewright.quantity import parse_bytes
from stagewright.schedules.catalog import SCHEDULES
from stagewright.spec.plan_rules import BATCH_NORMS, DTYPES, RECOMPUTES, check_choice, check_plan
from stagewright.zoo.check import check_name
from stagewright.zoo.named import catalog as catalogue

if TYPE_CHECKING:
    from stagewright.spec.plan import Plan

__all__ = ["compare"]

_HOW = "How it runs"
_BATCH = 32


def compare(
    model: ModelName,
    devices: Annotated[
        str, typer.Option(help="How many (one core or GPU each), or names: cpu:0,cpu:1.", rich_help_panel=_HOW)
    ] = "2",
    strategies: Annotated[
        str,
        typer.Option(
            help="Names with commas, meshes after spaces: 'serial,data data=2,pipeline=2'.", rich_help_panel=_HOW
        ),
    ] = "serial,data,tensor,pipeline",
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples in a step, over all workers. \\[default: 32]", rich_help_panel=_HOW),
    ] = None,
    microbatches: Annotated[int, typer.Option(min=1, help="Of a pipeline.", rich_help_panel=_HOW)] = 8,
    schedule: Annotated[str, typer.Option(help="Of a pipeline.", rich_help_panel=_HOW)] = "1f1b",
    policy: Annotated[
        str, typer.Option(help="Where a pipeline is cut; yours is module:function.", rich_help_panel=_HOW)
    ] = "optimal",
    cut: Annotated[list[str] | None, typer.Option(help="Cut after this unit.", rich_help_panel=_HOW)] = None,
    recompute: Annotated[str, typer.Option(help="none, always, except-last.", rich_help_panel=_HOW)] = "none",
    shard: Annotated[bool, typer.Option("--shard", help="Data parallel with FSDP2.", rich_help_panel=_HOW)] = False,
    codec: Annotated[
        str, typer.Option(help="On a pipeline's links: a codec, auto, or your module:Class.", rich_help_panel=_HOW)
    ] = "none",
    codec_backward: Annotated[
        str | None,
        typer.Option("--codec-backward", help="For gradients. \\[default: as --codec]", rich_help_panel=_HOW),
    ] = None,
    inference: Annotated[
        bool, typer.Option("--inference", help="Forward alone, as a stream.", rich_help_panel=_HOW)
    ] = False,
    memory: Annotated[
        str | None, typer.Option(help="Hold each device to this, like 2GiB.", rich_help_panel=_HOW)
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.", rich_help_panel=_HOW)] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before these.", rich_help_panel=_HOW)] = 3,
    rounds: Annotated[
        int,
        typer.Option(
            min=1, help="Run all in turns, so often; speed-ups are medians over rounds.", rich_help_panel=_HOW
        ),
    ] = 1,
    batch_norm: Annotated[str, typer.Option(help="plain or deferred.", rich_help_panel=_HOW)] = "plain",
    hang_s: Annotated[
        float, typer.Option(min=1, help="End a run whose workers do nothing for so long.", rich_help_panel=_HOW)
    ] = 300.0,
    root: Annotated[Path, typer.Option(help="Where run folders go.", rich_help_panel=_HOW)] = Path("runs"),
    json: Json = False,
    weights: Weights = None,
    image_size: ImageSize = None,
    sequence_length: SequenceLength = None,
    num_classes: NumClasses = None,
    dtype: RunDtype = None,
    seed: Seed = 0,
    units: Units = "auto",
) -> None:
    """Run one batch under each strategy, prove each equal to serial, and show what it gives."""
    check_name(model, weights)
    check_choice("schedule", schedule, SCHEDULES)
    check_choice("way to recompute", recompute, RECOMPUTES)
    check_choice("batch norm mode", batch_norm, BATCH_NORMS)
    check_choice("dtype", dtype or "float32", DTYPES)
    for name in (codec, codec_backward):
        if name is not None:
            check_codec(name)
    begin_importing()
    from stagewright.engine.jobs.compare import compare as run_all
    from stagewright.engine.jobs.compare import strategy_plans
    from stagewright.engine.parallel.resolve import check_cuts
    from stagewright.spec.local_check import check_here
    from stagewright.spec.plan import AXES, ModelSpec, Plan

    names = devices_of(devices)
    spec = ModelSpec(
        name=model,
        weights=weights,
        image_size=image_size,
        sequence_length=sequence_length,
        num_classes=num_classes,
        seed=seed,
    )
    base: dict[str, Any] = {
        "schedule": schedule,
        "recompute": recompute,
        "dtype": dtype or "float32",
        "batch_norm": batch_norm,
        "codec": codec,
        "codec_backward": codec_backward,
    }
    plan = Plan(
        model=spec,
        batch=_BATCH if batch is None else batch,
        split=policy,
        cuts=tuple(cut or ()),
        units=units,
        shard=shard,
        training=not inference,
        devices=names,
        memory_bytes=parse_bytes(memory) if memory else None,
        seed=seed,
        steps=steps,
        warmup=warmup,
        **base,
    )
    words = [name for word in strategies.split() for name in ([word] if "=" in word else re.split("[,;]", word))]
    chosen = [name for name in words if name]
    if not chosen:
        raise UsageError(f"--strategies {strategies!r} names none; write for example --strategies 'serial pipeline'")
    for name in chosen:
        if "=" not in name:
            check_choice("strategy", name, ("serial", *AXES))
    plans = list(dict.fromkeys(strategy_plans(plan, chosen, len(names), microbatches)))
    check_here(plan)
    _refuse_if_none_can_be(plans)
    named_units = units not in ("auto", "leaf")
    for one in [one for one in plans if one.cuts or named_units][:1]:
        check_cuts(one)
    if len(names) == 1 and len(chosen) > 1:
        note(f"one device, {names[0]}, leaves nothing to compare: serial alone is run; give two, like --devices 2")
    if batch is None and catalogue.is_factory(model):
        note(
            f"a step has {_BATCH} samples, as for every model (--batch sets another): rows of {model}'s example are "
            "repeated, or some left out"
        )
    if shard and not any(one.shard for one in plans):
        note("--shard divides what replicas hold, and no strategy here has any: add data to --strategies")

    def tell(one: Plan, text: str) -> None:
        note(f"{one.mesh.strategy}{', sharded' if one.shard else ''}: {text} …")

    rows = run_all(plans, root, rounds=rounds, progress=tell, hang_s=hang_s)
    if all(row.get("refused") for row in rows):
        raise UsageError(str(rows[0]["error"]))
    if json:
        print_json({"model": model, "rows": rows})
    else:
        from stagewright.report.tables.compare import compare_remarks, compare_table, failure_tracebacks

        kind = "inference" if inference else "training"
        console = screen()
        console.print(compare_table(rows, f"{model}: {kind}, {dtype or 'float32'}, devices {', '.join(names)}"))
        for line in compare_remarks(rows):
            console.print(line, markup=False)
        for text in failure_tracebacks(rows):
            note(text)
    if any("error" in row and not row["refused"] for row in rows):
        raise typer.Exit(1)
    if any(row["equal"] is False for row in rows):
        raise typer.Exit(3)


def _refuse_if_none_can_be(plans: Sequence[Plan]) -> None:
    """The first refusal where every plan is refused; a table has room for a few."""
    found = []
    for one in plans:
        try:
            check_plan(one)
            return
        except UsageError as error:
            found.append(error)
    raise found[0]
