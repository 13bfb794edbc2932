"""``stagewright run``: run a plan file, on this machine or as one of many workers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.cli import options as opt
from stagewright.cli.running.worker import PlanFile, Resume, worker
from stagewright.cli.screen import SCREEN, print_json, print_table
from stagewright.errors import UsageError

if TYPE_CHECKING:
    from stagewright.spec.plan import Plan


def run(
    plan: PlanFile,
    devices: opt.Devices = None,
    resume: Resume = False,
    data_dir: opt.DataDir = None,
    tokenizer: opt.Tokenizer = None,
    log: opt.Log = None,
    hang_s: opt.Timeout = 300.0,
    root: opt.Root = Path("runs"),
    json: opt.Json = False,
) -> None:
    """Run a plan.toml: on this machine, or under torchrun or Slurm's srun as one of its workers."""
    from stagewright.engine.worker.slurm import slurm_variables
    from stagewright.spec.plan_file import read_plan

    if "RANK" in os.environ or slurm_variables(os.environ):
        if log is not None:
            raise UsageError(f"--log {log} is for a run on one machine; workers write runs/RUN/workers/N/metrics.jsonl")
        worker(plan, hang_s=hang_s, resume=resume, data_dir=data_dir, tokenizer=tokenizer)
        return
    wanted = read_plan(plan)
    if wanted.task is not None:
        _train(
            wanted,
            devices,
            json=json,
            resume=resume,
            data_dir=data_dir,
            tokenizer=tokenizer,
            log=log,
            hang_s=hang_s,
            root=root,
        )
        return
    from stagewright.api.compare import run_plan
    from stagewright.api.inputs import parse_devices
    from stagewright.cli.running.compare import show_comparison

    if devices is not None or not wanted.devices:
        names = parse_devices(devices or wanted.mesh.num_workers, SCREEN)
        wanted = replace(wanted, devices=names[: wanted.mesh.num_workers])
    comparison = run_plan(wanted, root=root, hang_s=hang_s, progress=SCREEN)
    show_comparison(comparison, json=json, headline=False)


def _train(plan: Plan, devices: str | None, *, json: bool, **options: Any) -> None:
    from stagewright.api.train import train

    assert plan.task is not None
    result = train(plan.model.name, plan.task, plan=plan, devices=devices, progress=SCREEN, **options)
    if json:
        print_json(result.to_dict())
    else:
        print_table(result.table())
