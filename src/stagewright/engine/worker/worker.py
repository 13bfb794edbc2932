"""One worker: the same process under the local launcher, under ``torchrun`` and alone.

    environment ─► plan ─► device ─► pinned ─► job is imported, torch with it ─► process group ─► context ─► job runs

A job's module may define ``check_worker_plan(plan, device, num_local)``, called before there is a run folder unless the
local launcher has checked the plan, and ``merge_results(plan, run_folder)``, called by worker 0 at the end.

The order matters: a CPU device must be pinned before torch starts its threads, so this module imports torch only
inside functions. Any failure is recorded (``fault_record.py``) and raised as one error; the caller then ends the
process without waiting for threads that may block in a collective.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from stagewright.cluster.device import keep_freed_memory, pin_process
from stagewright.engine.worker.fault_record import record_faults
from stagewright.engine.worker.faults import activity, worker_folder
from stagewright.engine.worker.placement import RankPlacement, choose_device
from stagewright.engine.worker.process import call_before_sigterm, end_with_agent
from stagewright.engine.worker.store import agree_on_folder, connect_store, gather_files
from stagewright.engine.worker.watchdog import HANG_S, StoreWatchdog
from stagewright.errors import StagewrightError, UsageError
from stagewright.files.atomic import save_text
from stagewright.machine.out_of_memory import explain_oom
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan
from stagewright.spec.plan_file import read_plan
from stagewright.user_code import make_importable

JobOptions = Callable[[Plan], Mapping[str, str]]
"""From a plan, the options of its job: the text of each file by its name."""

DEFAULT_JOB = "stagewright.engine.jobs.measure:run_job"
"""The job of a worker: ``package.module:function`` of plan, context and run folder."""

TRAINING_JOB = "stagewright.engine.jobs.train:run_training"
"""The job where the plan names a task to train."""


def run_launched_worker(plan: str, run_folder: str, job: str, hang_s: str) -> None:
    """Run a worker of the local launcher, often forked from the fork server, in a session of its own."""
    os.setsid()
    # Each forked worker inherits a pipe that keeps the fork server alive; the server must end with the launcher.
    alive = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if alive is not None:
        os.close(alive)
    for stream in (sys.stdout, sys.stderr):  # files by now, which are not line-buffered by default
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    start_worker(Path(plan), Path(run_folder), job, float(hang_s))


def start_worker(plan: Path, run_folder: Path | None, job: str | None, hang_s: float) -> None:
    """Run this worker; any failure ends the process with one message."""
    try:
        run_worker(plan, run_folder, job=job, hang_s=hang_s, end=end_process)
    except StagewrightError as error:
        end_process(error)


def end_process(error: StagewrightError) -> None:
    """Print the error and end this process without waiting for its threads."""
    print(f"stagewright: {error}", file=sys.stderr, flush=True)  # noqa: T201
    sys.stdout.flush()
    os._exit(error.exit_code)


def run_worker(
    plan_path: Path,
    run_folder: Path | None = None,
    *,
    job: str | None = None,
    hang_s: float = HANG_S,
    options: JobOptions | None = None,
    end: Callable[[StagewrightError], None],
) -> None:
    """Run this worker's part of a plan; ``end`` must end the process at once (it is called from another thread).

    ``options``: the job's options, as files of a run folder that has none yet.
    """
    placement = RankPlacement.from_environment(os.environ)
    end_with_agent(has_agent=placement.store is not None)
    with record_faults(placement) as record:
        if placement.store is not None:
            call_before_sigterm(record.save_events)
        if run_folder is not None:
            record.open(run_folder)
        activity.begin("connect")
        plan = read_plan(plan_path)
        _check(plan, plan_path, placement)
        device = choose_device(plan, placement)
        record.device = device.text
        pin_process(device)
        keep_freed_memory()
        function = _load_job(job or (TRAINING_JOB if plan.task is not None else DEFAULT_JOB))
        if placement.launcher is None:
            _hook(function, "check_worker_plan", plan, device.text, placement.num_local)
        files = {} if job is not None or options is None else options(plan)
        store = connect_store(placement, hang_s)
        if run_folder is None:
            run_folder = agree_on_folder(store, placement, plan)
            record.open(run_folder)
        folder = RunFolder(run_folder)
        if placement.local_rank == 0 and not (run_folder / "plan.toml").exists():
            folder.write_plan(plan)
        for name, content in files.items() if placement.local_rank == 0 else ():
            if not (run_folder / name).exists():
                save_text(content, run_folder / name)
        watchdog = None
        if placement.store is not None and placement.launcher is None:
            watchdog = record.watchdog = StoreWatchdog(
                store,
                worker=placement.rank,
                device=device.text,
                hang_s=hang_s,
                end=lambda fault: end(record.write(fault)),
                num_workers=placement.num_workers,
                address=f"{placement.store[0]}:{placement.store[1]}",
            ).start()
        activity.begin("join")
        from stagewright.engine.worker.context import join_group, make_context
        from stagewright.engine.worker.recorder import recorder

        recorder.keep_in(worker_folder(run_folder, placement.rank))
        join_group(device, placement, plan.devices, hang_s)
        context = make_context(plan.mesh, placement.rank, device)
        activity.begin("begin")
        with explain_oom(f"worker {placement.rank}", lambda: activity.action, plan.memory_bytes):
            function(plan, context, folder)
        activity.begin("finish")
        if placement.launcher is None:
            gather_files(store, placement, folder)
            if placement.rank == 0:
                folder.finish("done", _hook(function, "merge_results", folder.plan(), folder))
        import torch.distributed as dist

        if dist.is_initialized():  # a user's job may have left the group
            dist.destroy_process_group()
        if watchdog is not None:
            watchdog.stop()


def _check(plan: Plan, path: Path, placement: RankPlacement) -> None:
    wanted = plan.mesh.num_workers
    if placement.num_workers != wanted:
        raise UsageError(
            f"{path} needs {wanted} workers ({plan.mesh}), but {placement.num_workers} were started; "
            f"use torchrun --nproc-per-node {wanted} -m stagewright worker {path} (or several machines with --nnodes)"
        )
    if plan.devices and len(plan.devices) != wanted:
        raise UsageError(f"{path} names {len(plan.devices)} devices for {wanted} workers; name one for each")


def _load_job(path: str) -> Callable[..., None]:
    module, colon, name = path.partition(":")
    make_importable()
    try:
        function = getattr(importlib.import_module(module), name) if colon else None
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the job {path!r} can't be loaded: {error}") from error
    if not callable(function):
        raise UsageError(f"{path!r} is not a job; write package.module:function")
    return function  # type: ignore[no-any-return]


def _hook(job: Callable[..., None], name: str, *args: object) -> Any:
    """Call a function of the job's module and return its result; None if the module has no such function."""
    function = getattr(sys.modules[job.__module__], name, None)
    return None if function is None else function(*args)
