"""Start the workers of a plan on this machine, watch them, and clean up.

    launcher ── store (loopback, in this process) ◄── connect ── worker 0 … worker n−1, each in its own session
        └────── ``supervisor.py``: watches exits, progress and the time limit, and ends them all

One error names the worker that failed, not the peers that lost their connection because of it. A worker also dies with
its launcher (``process.py`` asks the kernel for that), so even SIGKILL leaves no orphan process and no open port.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException

from stagewright.cluster.device import check_devices
from stagewright.engine.launch.fork_server import replaced_handlers
from stagewright.engine.launch.supervisor import LOOPBACK, POLL_S, Loopback, Supervisor
from stagewright.engine.worker.faults import root_cause, worker_folder
from stagewright.engine.worker.watchdog import HANG_S
from stagewright.engine.worker.worker import DEFAULT_JOB, run_launched_worker
from stagewright.errors import RunTerminated, StagewrightError
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan

_AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # whose handlers the agent replaces
_LOGGERS = ("torch.distributed.elastic", "torchelastic-events-null", "torch.multiprocessing.spawn")


def launch(
    plan: Plan,
    run_folder: RunFolder,
    *,
    job: str = DEFAULT_JOB,
    hang_s: float = HANG_S,
    timeout_s: float | None = None,
    on_poll: Callable[[], None] | None = None,
) -> None:
    """Run a plan on this machine's devices until it is done; a failure is one ``RunError``, Ctrl-C stays Ctrl-C.

    ``job`` is the function that each worker calls with plan, context and run folder: ``package.module:function``. The
    run is ended after ``hang_s`` without progress of any worker, or after ``timeout_s`` in total. ``on_poll`` is called
    repeatedly, to show progress; an exception from it ends the run.
    """
    check_devices(plan.devices)  # a missing GPU is reported before workers start
    folder = run_folder.path.resolve()
    if not (folder / "plan.toml").exists():
        run_folder.write_plan(plan)
    num_workers = plan.mesh.num_workers
    for worker in range(num_workers):
        worker_folder(folder, worker).mkdir(parents=True, exist_ok=True)
        # Remove files of an earlier attempt in this folder.
        for name in (
            *("activity.txt", "error.json", "log.txt", "process.json", "stack.txt"),
            *("events.parquet", "events.jsonl", "events.journal", "events.before.journal"),
        ):
            (worker_folder(folder, worker) / name).unlink(missing_ok=True)
    with _agent_log(folder / "launcher.log"), replaced_handlers(_AGENT_SIGNALS):
        spec = WorkerSpec(
            role="worker",
            local_world_size=num_workers,
            entrypoint=run_launched_worker,
            args=(str(folder / "plan.toml"), str(folder), job, repr(hang_s)),
            rdzv_handler=Loopback(),
            max_restarts=0,
            monitor_interval=POLL_S,
            local_addr=LOOPBACK,
        )
        agent = Supervisor(spec, folder, devices=plan.devices, hang_s=hang_s, timeout_s=timeout_s, on_poll=on_poll)
        try:
            result = agent.run()
        except SignalException as interruption:
            if interruption.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise RunTerminated(f"the run was ended by {interruption.sigval.name}") from None
        finally:
            agent.close()
    if agent.verdict is None and result.is_failed():
        agent.verdict = root_cause(agent.faults)
    if agent.verdict is not None:
        with contextlib.suppress(StagewrightError, OSError):  # with a full disk, the fault is still reported
            agent.verdict.write(folder / "fault.json")
            for worker in range(num_workers):
                run_folder.worker(worker).finalize_events()
        blamed = agent.verdict.worker
        log = None if blamed is None else worker_folder(run_folder.path, blamed) / "log.txt"
        raise agent.verdict.error(log)


@contextlib.contextmanager
def _agent_log(path: Path) -> Iterator[None]:
    """Send the agent's log to a file: users see only the one error."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.propagate for logger in loggers]
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk must not hide the fault
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.removeHandler(handler)
        with contextlib.suppress(OSError):  # the disk is full
            handler.close()
