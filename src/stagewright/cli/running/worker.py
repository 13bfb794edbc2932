"""``stagewright worker``: one worker of a run, as ``torchrun``, ``srun`` and the local launcher start it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli import options as opt
from stagewright.cli.screen import note
from stagewright.errors import StagewrightError

if TYPE_CHECKING:
    from stagewright.spec.plan import Plan

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.toml.", show_default=False)]
Resume = Annotated[bool, opt.files_option("--resume", help="Continue from the latest matching checkpoint; in runs/.")]


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
    from stagewright.engine.worker.faults import activity
    from stagewright.engine.worker.slurm import slurm_workers
    from stagewright.engine.worker.worker import end_process, run_worker

    def options(read: Plan) -> dict[str, str]:
        return _training_options(read, resume, data_dir, tokenizer)

    with slurm_workers(os.environ):
        try:
            run_worker(plan, run_folder, job=job, hang_s=hang_s, options=options, end=end_process)
        except StagewrightError as error:
            if activity.action == "connect":  # refused: nothing that blocks has started
                raise
            end_process(error)


def _training_options(plan: Plan, resume: bool, data_dir: Path | None, tokenizer: Path | None) -> dict[str, str]:
    """Return training.json, where the plan has a task: where the data is, and the checkpoint to continue from."""
    if plan.task is None:
        return {}
    from stagewright.engine.jobs.train import TrainingOptions, find_checkpoint, options_to_json

    checkpoint = find_checkpoint("runs", plan) if resume else None
    if resume and os.environ.get("RANK", "0") == "0":
        note(f"resuming from {checkpoint}" if checkpoint else "no checkpoint in runs/ matches; starting from scratch")
    options = TrainingOptions(
        data_dir=None if data_dir is None else str(data_dir.expanduser().resolve()),
        tokenizer=None if tokenizer is None else str(tokenizer.expanduser().resolve()),
        checkpoint=None if checkpoint is None else str(checkpoint.resolve()),
    )
    return {"training.json": options_to_json(options)}
