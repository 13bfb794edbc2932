"""``stagewright worker``: one worker of a run, as ``torchrun`` and the local launcher start it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["worker"]


def worker(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan's file.", show_default=False)],
    run_folder: Annotated[
        Path | None,
        typer.Option(
            "--run-folder",
            metavar="FOLDER",
            help="The run's folder. \\[default: a new one in runs/, named by worker 0]",
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="What to do: package.module:function. \\[default: run the plan]"),
    ] = None,
    hang_s: Annotated[
        float | None,
        typer.Option(
            "--hang-s", min=0.1, help="Seconds without any worker's progress that end the run. \\[default: 300]"
        ),
    ] = None,
) -> None:
    """Do one worker's part of a plan: `torchrun --nproc-per-node 2 -m stagewright worker plan.toml`."""
    from stagewright.engine.worker import Place, start_worker
    from stagewright.plan.file import read_plan
    from stagewright.plan.here import check_named

    if job is None:
        found, rank = read_plan(plan), Place.of(os.environ).rank
        check_named(found.model, found.devices[rank] if rank < len(found.devices) else None)
    start_worker(plan, run_folder, job, hang_s)
