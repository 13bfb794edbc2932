"""``stagewright train``: train a model on a task, under a plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from stagewright.cli import options as opt
from stagewright.cli.option_groups import with_groups
from stagewright.cli.screen import SCREEN, print_json, print_table
from stagewright.engine.launch.fork_server import start_fork_server
from stagewright.errors import UsageError
from stagewright.schedules.rules import SCHEDULES
from stagewright.spec.optimizers import OPTIMIZERS
from stagewright.spec.plan_rules import BATCH_NORMS, FSDP_GATHERS, LR_SCHEDULES
from stagewright.user_code import check_module
from stagewright.zoo import tasks
from stagewright.zoo.validation import check_name

_learn_option = opt.panel("Training")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options that override the plan's, or make a new plan."""

    strategy: Annotated[
        str | None,
        opt.run_option(
            metavar="NAME|MESH", help="Strategy; serial, ddp, zero2, fsdp, tensor, pp, dp=2,pp=2, … \\[default: serial]"
        ),
    ] = None
    microbatches: Annotated[int | None, opt.microbatches_option("4 in a pipeline")] = None
    micro_batch_size: opt.PlanMicroBatchSize = None
    schedule: Annotated[
        str | None,
        opt.choice("schedule", SCHEDULES, opt.run_option, metavar="NAME", help=f"{opt.SCHEDULE_HELP} \\[1f1b]"),
    ] = None
    cut: opt.Cut = None
    recompute: Annotated[str | None, opt.recompute_option(help="Activation checkpointing. \\[none]")] = None
    codec: Annotated[
        str | None, opt.run_option(metavar="NAME", help="Codec of a pipeline's links; a name, auto, or module:Class.")
    ] = None
    shard: opt.Shard = False
    fsdp_shards: Annotated[int | None, opt.run_option("--fsdp-shards", min=2, hidden=True)] = None
    fsdp_gather: Annotated[
        str | None, opt.choice("fsdp_gather", FSDP_GATHERS, opt.run_option, "--fsdp-gather", hidden=True)
    ] = None
    zero: Annotated[int, opt.run_option("--zero", min=0, max=2, hidden=True)] = 0  # in help as --strategy zero2
    vocab_parallel: Annotated[bool, opt.run_option("--vocab-parallel", hidden=True)] = False
    sequence_parallel: Annotated[bool, opt.run_option("--sequence-parallel", hidden=True)] = False
    optimizer_in_backward: Annotated[bool, opt.run_option("--optimizer-in-backward", hidden=True)] = False
    offload: Annotated[str | None, opt.offload_option(hidden=True)] = None
    speeds: Annotated[str | None, opt.run_option("--speeds", hidden=True)] = None
    precision: opt.Precision = None
    compile: opt.Compile = None
    batch_norm: Annotated[
        str | None,
        opt.choice(
            "batch norm mode", BATCH_NORMS, opt.run_option, help="Statistics of a micro-batch, or of the batch."
        ),
    ] = None
    epochs: Annotated[int | None, _learn_option(min=1, help="Passes over the samples. \\[default: 3]")] = None
    batch: Annotated[int | None, _learn_option(min=1, help="Global batch: samples in a step. \\[default: 64]")] = None
    optimizer: Annotated[
        str | None, opt.choice("optimizer", OPTIMIZERS, _learn_option, help="Optimizer. \\[default: adamw]")
    ] = None
    learning_rate: Annotated[
        float | None, _learn_option("--learning-rate", "--lr", help="Learning rate. \\[default: 0.001]")
    ] = None
    lr_schedule: Annotated[
        str | None,
        opt.choice(
            "learning-rate schedule",
            LR_SCHEDULES,
            _learn_option,
            "--lr-schedule",
            help="LR decay. \\[default: constant]",
        ),
    ] = None
    lr_warmup_steps: Annotated[
        int | None, _learn_option("--lr-warmup-steps", min=0, help="Steps of linear warm-up. \\[default: 0]")
    ] = None
    momentum: Annotated[float | None, _learn_option(help="Momentum of sgd and rmsprop.")] = None
    weight_decay: Annotated[float | None, _learn_option("--weight-decay", help="Weight decay.")] = None
    clip: Annotated[
        float | None, _learn_option("--clip", "--max-grad-norm", help="Clip gradients to this global norm.")
    ] = None
    checkpoint_every: Annotated[
        int | None, opt.files_option("--checkpoint-every", min=1, help="Steps between checkpoints.")
    ] = None

    def given(self) -> dict[str, Any]:
        """Return them by their names in a plan; None keeps the plan's value."""
        opt.check_microbatches(self.microbatches, self.micro_batch_size)
        values = asdict(self)
        cuts, strategy = opt.unit_names(values.pop("cut")), values.pop("strategy")
        return {
            **values,
            "mesh": strategy,
            "cuts": cuts or None,
            "shard": self.shard or None,
            "zero": self.zero or None,
            "vocab_parallel": self.vocab_parallel or None,
            "sequence_parallel": self.sequence_parallel or None,
            "optimizer_in_backward": self.optimizer_in_backward or None,
            "speeds": opt.parse_speeds(self.speeds) or None,
            "recompute": None if self.recompute is None else opt.parse_mode_or_units(self.recompute),
            "offload": None if self.offload is None else opt.parse_mode_or_units(self.offload),
        }


@with_groups
def train(
    model: opt.ModelName,
    task: Annotated[
        str, typer.Argument(metavar="TASK", help=f"{', '.join(tasks.names())}, or module:name.", show_default=False)
    ],
    plan: Annotated[Path | None, opt.run_option(metavar="FILE", help="A plan.toml; options override it.")] = None,
    *,
    options: PlanOptions,
    devices: opt.Devices = None,
    max_restarts: Annotated[int, opt.run_option("--max-restarts", min=0, help="Go on after a lost worker.")] = 0,
    hang_s: opt.Timeout = 300.0,
    seeds: Annotated[
        str | None, _learn_option(metavar="LIST", help="Seeds, with commas; one run each. \\[default: 0]")
    ] = None,
    resume: Annotated[
        bool, opt.files_option("--resume", help="Continue from the latest matching checkpoint; in --root.")
    ] = False,
    start: Annotated[
        Path | None, opt.files_option("--from", metavar="DIR", help="Start from this run or checkpoint.")
    ] = None,
    save_weights: Annotated[
        Path | None,
        opt.files_option("--save-weights", metavar="DIR", help="Write the trained weights here (safetensors)."),
    ] = None,
    log: opt.Log = None,
    root: opt.Root = Path("runs"),
    data_dir: opt.DataDir = None,
    tokenizer: opt.Tokenizer = None,
    json: opt.Json = False,
    weights: opt.Weights = None,
    image_size: opt.ImageSize = None,
    sequence_length: opt.SequenceLength = None,
    units: opt.Units = "auto",
) -> None:
    """Train a model on a task or on your own data, with checkpoints and an evaluation after each epoch."""
    check_name(model, weights)
    source = tasks.own_data(task)
    if source is None:
        tasks.entry(task)
    else:
        check_module(source, "task", "task")
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
        save_weights=save_weights,
        data_dir=data_dir,
        tokenizer=tokenizer,
        log=log,
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
