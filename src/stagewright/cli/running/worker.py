"""``stagewright worker``: one worker of a run, as ``torchrun``, ``srun`` and the local launcher start it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli import options as opt
from stagewright.cli.screen import note

if TYPE_CHECKING:
    from stagewright.spec.plan import Plan

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.toml.", show_default=False)]
Resume = Annotated[
    bool, opt.files_option("--resume", help="Continue training from the latest matching checkpoint in runs/.")
]


def worker(
    plan: PlanFile,
    run_folder: Annotated[
        Path | None,
        opt.files_option("--run-folder", metavar="DIR", help="The run folder. \\[default: a new one in runs/]"),
    ] = None,
    job: Annotated[
        str | None, opt.run_option(metavar="PATH", help="Job: package.module:function. \\[default: the plan's]")
    ] = None,
    hang_s: opt.Timeout = 300.0,
    resume: Resume = False,
    data_dir: opt.DataDir = None,
    tokenizer: opt.Tokenizer = None,
) -> None:
    """Run one worker of a plan: `torchrun --nproc-per-node 2 -m stagewright worker plan.toml`."""
    from stagewright.engine.worker.slurm import slurm_workers
    from stagewright.engine.worker.worker import start_worker
    from stagewright.spec.plan_file import read_plan

    with slurm_workers(os.environ):
        files = {}
        if job is None:
            wanted = read_plan(plan)
            _check(wanted)
            if wanted.task is not None:
                files["training.json"] = _training_options(wanted, resume, data_dir, tokenizer)
        start_worker(plan, run_folder, job, hang_s, files)


def _check(plan: Plan) -> None:
    """Refuse a model or a device that this machine does not have before there is a run folder."""
    from stagewright.cluster.device import pin_process
    from stagewright.engine.worker.placement import RankPlacement, choose_device
    from stagewright.spec.local_check import check_names_exist, check_on_this_machine

    place = RankPlacement.from_environment(os.environ)
    if plan.devices and place.rank >= len(plan.devices):
        return  # the worker reports how many there must be
    check_names_exist(plan.model, plan.devices[place.rank] if plan.devices else None)
    device = choose_device(plan, place)
    pin_process(device)  # before a user's module imports torch
    check_on_this_machine(replace(plan, devices=(device.text,)))


def _training_options(plan: Plan, resume: bool, data_dir: Path | None, tokenizer: Path | None) -> str:
    """Return training.json: where the data is, and the checkpoint to continue from."""
    from stagewright.engine.jobs.train import TrainingOptions, find_checkpoint, options_to_json

    checkpoint = find_checkpoint("runs", plan) if resume else None
    if resume and os.environ.get("RANK", "0") == "0":
        note(f"resuming from {checkpoint}" if checkpoint else "no checkpoint in runs/ matches; starting from scratch")
    return options_to_json(
        TrainingOptions(
            data_dir=None if data_dir is None else str(data_dir.expanduser().resolve()),
            tokenizer=None if tokenizer is None else str(tokenizer.expanduser().resolve()),
            checkpoint=None if checkpoint is None else str(checkpoint.resolve()),
        )
    )
