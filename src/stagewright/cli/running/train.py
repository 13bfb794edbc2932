"""``stagewright train``: train a model on a task, under a plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from stagewright.cli.option_groups import with_groups
from stagewright.cli.options import ImageSize, Json, ModelName, SequenceLength, Units, Weights, panel
from stagewright.cli.screen import SCREEN, print_json, print_table
from stagewright.engine.launch.fork_server import start_fork_server
from stagewright.errors import UsageError
from stagewright.zoo import tasks
from stagewright.zoo.validation import check_name

_how_option = panel("How it runs")
_learn_option = panel("Training")
_keep_option = panel("Files")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options that override the plan's, or make a new plan."""

    mesh: Annotated[str | None, _how_option(help="Like data=2,pipeline=2. \\[default: serial]")] = None
    microbatches: Annotated[
        int | None, _how_option(min=1, help="Micro-batches of each replica. \\[default: 4 in a pipeline, else 1]")
    ] = None
    schedule: Annotated[str | None, _how_option(help="Schedule of a pipeline. \\[default: 1f1b]")] = None
    cut: Annotated[list[str] | None, _how_option(help="Cut after this unit.")] = None
    recompute: Annotated[str | None, _how_option(help="Activation checkpointing: none, always, except-last.")] = None
    codec: Annotated[str | None, _how_option(help="On a pipeline's links: a codec, auto, or your module:Class.")] = None
    shard: Annotated[bool, _how_option("--shard", help="Data parallel with FSDP2.")] = False
    dtype: Annotated[str | None, _how_option(help="float32 or bfloat16.")] = None
    epochs: Annotated[int | None, _learn_option(min=1, help="\\[default: 3]")] = None
    batch: Annotated[int | None, _learn_option(min=1, help="Global batch: samples in a step. \\[default: 64]")] = None
    optimizer: Annotated[str | None, _learn_option(help="sgd, adam or adamw. \\[default: adamw]")] = None
    learning_rate: Annotated[float | None, _learn_option("--learning-rate", help="\\[default: 0.001]")] = None
    momentum: Annotated[float | None, _learn_option(help="Momentum of sgd.")] = None
    weight_decay: Annotated[float | None, _learn_option("--weight-decay")] = None
    clip: Annotated[float | None, _learn_option(help="Clip gradients to this global norm.")] = None
    batch_norm: Annotated[str | None, _learn_option(help="Statistics by micro-batch (plain) or batch (deferred).")] = (
        None
    )
    checkpoint_every: Annotated[
        int | None, _keep_option("--checkpoint-every", min=1, help="Steps between checkpoints.")
    ] = None

    def given(self) -> dict[str, Any]:
        """Return them by their names in a plan; None keeps the plan's value."""
        values = asdict(self)
        cut = values.pop("cut")
        return {**values, "cuts": tuple(cut) if cut else None, "shard": self.shard or None}


@with_groups
def train(
    model: ModelName,
    task: Annotated[
        str, typer.Argument(metavar="TASK", help=f"One of {', '.join(tasks.names())}.", show_default=False)
    ],
    plan: Annotated[Path | None, _how_option(metavar="FILE", help="A plan.toml; options override it.")] = None,
    *,
    options: PlanOptions,
    devices: Annotated[str | None, _how_option(help="How many (one GPU or core each), or names: cpu:0,cpu:1.")] = None,
    max_restarts: Annotated[
        int, _how_option("--max-restarts", min=0, help="After a lost worker, go on from the last checkpoint.")
    ] = 0,
    hang_s: Annotated[float, _how_option(min=0.1, help="End a run without progress after this many seconds.")] = 300.0,
    seeds: Annotated[
        str | None, _learn_option(help="One run a seed, with commas: 0,1,2. \\[default: 0, or the plan's]")
    ] = None,
    resume: Annotated[
        bool, _keep_option("--resume", help="Continue from the latest matching checkpoint under --root.")
    ] = False,
    start: Annotated[
        Path | None, _keep_option("--from", metavar="DIR", help="Start from this run or checkpoint.")
    ] = None,
    export: Annotated[
        Path | None, _keep_option(metavar="DIR", help="Write the trained weights here, as model.safetensors.")
    ] = None,
    root: Annotated[Path, _keep_option(help="Where run folders go.")] = Path("runs"),
    data_dir: Annotated[Path | None, _keep_option("--data-dir", help="A folder of parquet files.")] = None,
    tokenizer: Annotated[Path | None, _keep_option(metavar="DIR", help="A folder with tokenizer.json.")] = None,
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
        hang_s=hang_s,
        max_restarts=max_restarts,
        progress=SCREEN,
        weights=weights,
        image_size=image_size,
        sequence_length=sequence_length,
        units=units if units != "auto" else None,
        **options.given(),
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
