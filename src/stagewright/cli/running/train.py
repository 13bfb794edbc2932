"""``stagewright train``: a model on a task, under a plan, for real."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.options import ImageSize, Json, ModelName, SequenceLength, Units, Weights, devices_of
from stagewright.cli.screen import note, print_json, screen
from stagewright.engine.launch.fork_server import begin_importing
from stagewright.errors import UsageError
from stagewright.quantity import format_s
from stagewright.zoo import tasks
from stagewright.zoo.check import check_name, takes_option

if TYPE_CHECKING:
    from stagewright.spec.plan import Plan

__all__ = ["train"]

_HOW = "How it runs"
_LEARN = "How it learns"
_KEEP = "What is kept"
_LINE_S = 5.0  # between two lines of progress


def train(
    model: ModelName,
    task: Annotated[
        str, typer.Argument(metavar="TASK", help=f"One of {', '.join(tasks.names())}.", show_default=False)
    ],
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="plan.toml; options beside it win.", rich_help_panel=_HOW),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="data=2,pipeline=2. \\[default: serial]", rich_help_panel=_HOW)
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(min=1, help="Of each replica. \\[default: 4 of a pipeline, else 1]", rich_help_panel=_HOW),
    ] = None,
    schedule: Annotated[str | None, typer.Option(help="Of a pipeline. \\[default: 1f1b]", rich_help_panel=_HOW)] = None,
    cut: Annotated[list[str] | None, typer.Option(help="Cut after this unit.", rich_help_panel=_HOW)] = None,
    recompute: Annotated[str | None, typer.Option(help="none, always, except-last.", rich_help_panel=_HOW)] = None,
    codec: Annotated[
        str | None,
        typer.Option(help="On a pipeline's links: a codec, auto, or your module:Class.", rich_help_panel=_HOW),
    ] = None,
    shard: Annotated[bool, typer.Option("--shard", help="Data parallel with FSDP2.", rich_help_panel=_HOW)] = False,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.", rich_help_panel=_HOW)] = None,
    devices: Annotated[
        str | None,
        typer.Option(help="How many (one core or GPU each), or names: cpu:0,cpu:1.", rich_help_panel=_HOW),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="\\[default: 3]", rich_help_panel=_LEARN)] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples in a step. \\[default: 64]", rich_help_panel=_LEARN)
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="sgd, adam or adamw. \\[default: adamw]", rich_help_panel=_LEARN)
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", help="\\[default: 0.001]", rich_help_panel=_LEARN)
    ] = None,
    momentum: Annotated[float | None, typer.Option(help="Of sgd.", rich_help_panel=_LEARN)] = None,
    weight_decay: Annotated[float | None, typer.Option("--weight-decay", rich_help_panel=_LEARN)] = None,
    clip: Annotated[
        float | None,
        typer.Option(help="Scale gradients down to this norm, over the whole model.", rich_help_panel=_LEARN),
    ] = None,
    batch_norm: Annotated[str | None, typer.Option(help="plain or deferred.", rich_help_panel=_LEARN)] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="One run each, with commas: 0,1,2. \\[default: 0, or the plan's]", rich_help_panel=_LEARN),
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option("--checkpoint-every", min=1, help="Steps between checkpoints.", rich_help_panel=_KEEP)
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the last checkpoint under --root that fits.", rich_help_panel=_KEEP),
    ] = False,
    start: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Go on from this run or checkpoint.", rich_help_panel=_KEEP),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the weights there as model.safetensors.", rich_help_panel=_KEEP),
    ] = None,
    root: Annotated[Path, typer.Option(help="Where run folders go.", rich_help_panel=_KEEP)] = Path("runs"),
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="A folder of parquet files.", rich_help_panel=_KEEP)
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With tokenizer.json.", rich_help_panel=_KEEP)
    ] = None,
    json: Json = False,
    weights: Weights = None,
    image_size: ImageSize = None,
    sequence_length: SequenceLength = None,
    units: Units = "auto",
) -> None:
    """Train a model on a task, with checkpoints and an evaluation after each epoch."""
    check_name(model, weights)
    entry = tasks.entry(task)
    begin_importing()
    from stagewright.engine.jobs.train import TrainingOptions, find_checkpoint
    from stagewright.engine.jobs.train import train as run

    chosen = _plan(
        plan,
        {"name": model, "weights": weights, "image_size": image_size, "sequence_length": sequence_length},
        {"name": optimizer, "learning_rate": learning_rate, "momentum": momentum, "weight_decay": weight_decay},
        {
            "mesh": mesh,
            "microbatches": microbatches,
            "schedule": schedule,
            "cuts": tuple(cut) if cut else None,
            "recompute": recompute,
            "shard": shard or None,
            "codec": codec,
            "dtype": dtype,
            "epochs": epochs,
            "batch": batch,
            "clip": clip,
            "batch_norm": batch_norm,
            "checkpoint_every": checkpoint_every,
            "units": units if units != "auto" else None,
        },
        num_classes=entry.num_classes if takes_option(model, "num_classes") else None,
    )
    if devices is not None:
        names, count = devices_of(devices), chosen.mesh.num_workers
        if len(names) < count:
            raise UsageError(
                f"{chosen.mesh} needs {count} devices, but --devices gives {len(names)}; use --devices {count}"
            )
        chosen = replace(chosen, devices=names[:count])
    plans = [
        replace(chosen, task=task, seed=seed, model=replace(chosen.model, seed=seed))
        for seed in _seeds(seeds, chosen.seed)
    ]
    _check(plans, data_dir)
    if export is not None and export.exists() and not export.is_dir():
        raise UsageError(f"--export {export}: that is a file; name a folder, which is made if it is not there")
    if tokenizer is not None and not tokenizer.expanduser().is_dir():
        raise UsageError(f"--tokenizer {tokenizer}: there is no such folder; name one that has tokenizer.json")
    named = None if start is None else _checkpoint_of(start)
    begun = [named or (find_checkpoint(root, one) if resume else None) for one in plans]
    if resume and not any(begun):
        raise UsageError(
            f"--resume: no run in {root} has a checkpoint of {model} on {task} with batch {chosen.batch} and seed "
            f"{' or '.join(str(one.seed) for one in plans)}; leave --resume out to start anew (--checkpoint-every 100 "
            "keeps checkpoints)"
        )
    results: list[dict[str, Any]] = []
    for one, found in zip(plans, begun, strict=True):
        seed = one.seed
        if resume and found is None:
            note(f"seed {seed}: no checkpoint in {root} fits; starting anew")
        elif found is not None:
            note(f"seed {seed}: going on from {found}")
            _note_pieces(one, found)
        options = TrainingOptions(
            data_dir=str(data_dir) if data_dir is not None else None,
            tokenizer=str(tokenizer) if tokenizer is not None else None,
            checkpoint=str(found.resolve()) if found is not None else None,
            export=str(export.resolve() / (f"seed-{seed}" if results or "," in (seeds or "") else ""))
            if export
            else None,
        )
        results.append(run(one, root, options=options, progress=_teller(one)))
    if not json:
        from stagewright.report.tables.train import train_table

        screen().print(train_table(results, f"{model} on {task}: {chosen.mesh.strategy}, batch {chosen.batch}"))
        return
    from stagewright.report.tables.train import summary

    print_json({"model": model, "task": task, "metric": results[0]["metric"], **summary(results), "runs": results})


def _plan(
    path: Path | None,
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    num_classes: int | None,
) -> Plan:
    """The plan of the file with what was typed beside it, or one of what was typed alone."""
    from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan
    from stagewright.spec.plan_file import read_plan

    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    learned = {name: value for name, value in optimizer.items() if value is not None}
    named = {name: value for name, value in model.items() if value is not None}
    if "mesh" in given:
        given["mesh"] = Mesh.parse(given["mesh"])
    if path is None:
        wanted = given.get("mesh", Mesh())
        defaults = {"batch": 64, "epochs": 3, "microbatches": 4 if wanted.pipeline > 1 else 1}
        spec = OptimizerSpec(**{"name": "adamw", "learning_rate": 1e-3, **learned})
        return Plan(**{**defaults, **given, "model": ModelSpec(num_classes=num_classes, **named), "optimizer": spec})
    found = read_plan(path)
    if found.model.name != named["name"]:
        raise UsageError(
            f"{path} is a plan for {found.model.name!r}, not for {named['name']!r}; name that one, or leave --plan out"
        )
    if {"mesh", "schedule", "cuts"} & given.keys():  # what the file says of stages is of its own mesh
        given = {"cuts": (), "stages": None, "placement": "auto", "devices": (), **given}
    if found.epochs is None and "epochs" not in given:
        given["epochs"] = 3
    if found.model.num_classes is None:
        named["num_classes"] = num_classes
    spec = replace(found.optimizer, **learned)
    return replace(found, **given, model=replace(found.model, **named), optimizer=spec, training=True)


def _check(plans: Sequence[Plan], data_dir: Path | None) -> None:
    """Refuse what can't be trained here before there is a run: plans that differ in their seeds, model, task, data."""
    from stagewright.engine.parallel.resolve import check_cuts
    from stagewright.spec.local_check import check_here
    from stagewright.spec.plan_rules import check_plan
    from stagewright.zoo.tasks import check_task

    for plan in plans:
        check_plan(plan)
    plan = plans[0]
    about = check_here(plan)
    check_task(str(plan.task), plan.model.name, plan.model.load() if about is None else about, data_dir=data_dir)
    if plan.cuts or plan.units not in ("auto", "leaf"):
        check_cuts(plan)


def _seeds(text: str | None, default: int) -> list[int]:
    if text is None:
        return [default]
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r} is not a list of seeds; write whole numbers with commas, like 0,1,2") from None
    return list(dict.fromkeys(found))


def _checkpoint_of(path: Path) -> Path:
    """A checkpoint itself, or the last one of a run."""
    from stagewright.engine.state.checkpoint import latest

    if (path / "index.json").is_file():
        return path
    found = latest(path / "checkpoints")
    if found is None:
        raise UsageError(
            f"{path} is neither a checkpoint nor a run that has one; name a folder below runs/ that was made with "
            "--checkpoint-every"
        )
    return found


def _note_pieces(plan: Plan, checkpoint: Path) -> None:
    """Say where a run goes on with its batches cut otherwise than before."""
    from stagewright.engine.state.checkpoint import Checkpoint
    from stagewright.spec.plan import Mesh

    saved = Checkpoint.open(checkpoint).content
    now = plan.mesh.data * plan.microbatches
    before = Mesh.parse(saved["mesh"]).data * saved["codec"]["microbatches"] if "codec" in saved else now
    if now != before:
        note(
            f"beware: batches were cut into {_pieces(before)} and are now into {_pieces(now)}; dropout, batch norm and "
            "losses that compare samples go by micro-batch, so a model with one of these gets other losses than in an "
            f"unbroken run; for the same ones choose replicas × --microbatches = {before}"
        )


def _pieces(count: int) -> str:
    return f"{count} micro-batch{'es' if count > 1 else ''}"


def _teller(plan: Plan) -> Callable[[Mapping[str, Any]], None]:
    """Tells how far a run is, from the lines of the worker that owns the loss."""
    total, last = 0, time.monotonic()
    done, seconds, samples = 0, 0.0, 0

    def tell(line: Mapping[str, Any]) -> None:
        nonlocal total, last, done, seconds, samples
        if line["kind"] == "begin":
            total = line["total"]
            note(f"seed {plan.seed}: {plan.mesh.strategy}, {total - line['step']} steps, {line['batches']} an epoch")
        elif line["kind"] == "step":
            done, seconds, samples = done + 1, seconds + line["seconds"], samples + line["samples"]
            if time.monotonic() - last >= _LINE_S:
                last = time.monotonic()
                left = (total - line["step"]) * seconds / done
                note(
                    f"seed {plan.seed}: epoch {line['epoch']}, step {line['step']}/{total}, loss {line['loss']:.4f}, "
                    f"{samples / seconds:.1f} samples/s, {format_s(left)} left"
                )
        else:
            metric = next(name for name in ("accuracy", "matthews") if name in line)
            note(
                f"seed {plan.seed}: epoch {line['epoch']}: training loss {line['training_loss']:.4f}, evaluation loss "
                f"{line['evaluation_loss']:.4f}, {metric} {line[metric]:.4f}, {line['samples_per_s']:.1f} samples/s, "
                f"{format_s((total - line['step']) * seconds / max(done, 1))} left"
            )

    return tell
