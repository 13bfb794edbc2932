"""``stagewright worker``: one worker of a run, as ``torchrun`` and the local launcher start it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from stagewright.spec.plan import Plan


def worker(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.toml.", show_default=False)],
    run_folder: Annotated[
        Path | None,
        typer.Option("--run-folder", metavar="FOLDER", help="The run folder. \\[default: a new one in runs/]"),
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="PATH", help="Job to run: package.module:function. \\[default: the plan's]")
    ] = None,
    hang_s: Annotated[
        float | None,
        typer.Option("--hang-s", min=0.1, help="End a run without progress after this many seconds. \\[default: 300]"),
    ] = None,
) -> None:
    """Run one worker of a plan: `torchrun --nproc-per-node 2 -m stagewright worker plan.toml`."""
    from stagewright.engine.worker.worker import start_worker
    from stagewright.spec.plan_file import read_plan

    if job is None:
        _check(read_plan(plan))
    start_worker(plan, run_folder, job, hang_s)


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
