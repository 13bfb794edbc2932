"""One worker: the same process under the local launcher, under ``torchrun`` and alone.

    environment ─► plan ─► device ─► pinned ─► torch is imported ─► process group ─► context ─► job

The order matters: a CPU device must be pinned before torch starts its threads, so this module imports torch only
inside functions. Whatever goes wrong is written down (``fault.py``) and raised as one error; the caller then ends the
process without waiting for threads that may be stuck in a peer. What was recorded until then is written first, and also
before SIGTERM ends a worker; but never for longer than ``SAVE_S``.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.cluster.device import Device, has_gpu, keep_freed_memory, pin_process
from stagewright.engine.worker.faults import Fault, activity, worker_folder
from stagewright.engine.worker.host_memory_check import check_builds
from stagewright.engine.worker.process import ProcessMark
from stagewright.engine.worker.watchdog import HANG_S, START_S, StoreWatch, tell_agent
from stagewright.errors import StagewrightError, UsageError
from stagewright.machine.machine import spread_cores
from stagewright.machine.out_of_memory import refusals
from stagewright.runs.run_folder import RunFolder, Status
from stagewright.runs.worker_folder import WorkerFolder
from stagewright.spec.plan import Plan
from stagewright.spec.plan_file import read_plan

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = [
    "DEFAULT_JOB",
    "LAUNCHER",
    "Place",
    "choose_device",
    "connect",
    "end_process",
    "launched_worker",
    "run_worker",
    "start_watch",
    "start_worker",
]

DEFAULT_JOB = "stagewright.engine.jobs.measure:run_job"
"""What a worker does: ``package.module:function`` of plan, context and run folder."""

TRAINING_JOB = "stagewright.engine.jobs.train:run_training"
"""… where the plan names a task to train."""

LAUNCHER = "STAGEWRIGHT_LAUNCHER"
"""The variable with the local launcher's process id: it watches, so that its workers need not."""

SAVE_S = 1.5
"""A worker that ends early writes its events for at most so long: its launcher waits two seconds for it."""

# What worker 0 gathers from workers of other machines.
_GATHERED = (
    "result.json",
    "metrics.jsonl",
    "clock.json",
    "events.parquet",
    "events.jsonl",
    "memory.parquet",
    "memory.jsonl",
)
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the environment puts this process among the workers."""

    rank: int = 0
    """World rank."""
    local_rank: int = 0
    """Rank on this machine."""
    num_workers: int = 1
    """Workers in all."""
    num_machines: int = 1
    """Machines (agents)."""
    store: tuple[str, int] | None = None
    """Host and port of the agent's store; None: this process is alone."""
    launcher: int | None = None
    """Process id of our own launcher, if it was that."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """Read what the elastic agent (torchrun's or our launcher's) has set."""
        if "RANK" not in environment:
            return cls()
        try:
            return cls(
                rank=int(environment["RANK"]),
                local_rank=int(environment["LOCAL_RANK"]),
                num_workers=int(environment["WORLD_SIZE"]),
                num_machines=int(environment.get("GROUP_WORLD_SIZE", "1")),
                store=(environment["MASTER_ADDR"], int(environment["MASTER_PORT"])),
                launcher=int(environment[LAUNCHER]) if LAUNCHER in environment else None,
            )
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"RANK is set, but not all that comes with it ({error}); start workers with torchrun, or unset RANK"
            ) from None


def launched_worker(plan: str, run_folder: str, job: str, hang_s: str) -> None:
    """What the local launcher starts, often as a copy of a process that has imported everything: a session of its own.

    Its output is in a file by now, line by line as in a fresh process.
    """
    os.setsid()
    # Each copy holds a pipe that keeps the copied process alive, which must end with the launcher, and copies with it.
    alive = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if alive is not None:
        os.close(alive)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    start_worker(Path(plan), Path(run_folder), job, float(hang_s))


def start_worker(plan: Path, run_folder: Path | None, job: str | None, hang_s: float | None) -> None:
    """Run this worker; whatever fails ends the process with one message."""
    try:
        run_worker(plan, run_folder, job=job, hang_s=HANG_S if hang_s is None else hang_s, end=end_process)
    except StagewrightError as error:
        end_process(error)


def end_process(error: StagewrightError) -> None:
    """The last word of this process, which ends without waiting for stuck threads."""
    print(f"stagewright: {error}", file=sys.stderr, flush=True)  # noqa: T201
    sys.stdout.flush()
    os._exit(error.exit_code)


def run_worker(
    plan_path: Path,
    run_folder: Path | None = None,
    *,
    job: str | None = None,
    hang_s: float = HANG_S,
    end: Callable[[StagewrightError], None],
) -> None:
    """Do this worker's part of a plan; ``end`` must end the process at once (it is called from another thread)."""
    place = Place.of(os.environ)
    _follow_the_agent(place)
    with _faults(place) as record:
        if place.store is not None:
            _save_before_sigterm(record)
        if run_folder is not None:
            record.open(run_folder)
        activity.begin("connect")
        plan = read_plan(plan_path)
        _check(plan, plan_path, place)
        device = choose_device(plan, place)
        record.device = device.text
        pin_process(device)
        keep_freed_memory()
        store = connect(place, hang_s)
        if run_folder is None:
            run_folder = _agree_on_folder(store, place, plan)
            record.open(run_folder)
        folder = RunFolder(run_folder)
        if place.local_rank == 0 and not (run_folder / "plan.toml").exists():
            folder.write_plan(plan)
        watch = None
        if place.store is not None and place.launcher is None:
            watch = record.watch = start_watch(store, place, device, hang_s, lambda fault: end(record.write(fault)))
        activity.begin("join")
        from stagewright.engine.worker.context import make_context
        from stagewright.engine.worker.process_group import join_group
        from stagewright.engine.worker.recorder import recorder

        recorder.keep_in(worker_folder(run_folder, place.rank))
        # The watch knows more: this ends a wait only where the watch itself is gone.
        options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=2 * max(hang_s, START_S))}
        if place.store is None:
            options |= {"store": store, "rank": 0, "world_size": 1}
        one_machine = place.num_machines == 1
        join_group(device, worker=place.rank, devices=plan.devices, one_machine=one_machine, **options)
        function = _load_job(job or (TRAINING_JOB if plan.task is not None else DEFAULT_JOB))
        context = make_context(plan.mesh, place.rank, device)
        activity.begin("begin")
        _check_host(plan, place, function)
        with refusals(f"worker {place.rank}", lambda: activity.action, plan.memory_bytes):
            function(plan, context, folder)
        activity.begin("finish")
        if place.launcher is None:
            _conclude(function, plan, store, place, folder)
        _leave()
        if watch is not None:
            watch.stop()


def choose_device(plan: Plan, place: Place) -> Device:
    """The plan's device for this rank; where the plan names none, the machine's GPU or core of this local rank."""
    if plan.devices:
        return Device.parse(plan.devices[place.rank])
    if has_gpu():
        return Device.parse(f"cuda:{place.local_rank}")
    cores = spread_cores()
    if place.local_rank >= len(cores):
        raise UsageError(
            f"worker {place.rank} is number {place.local_rank} on this machine, which has {len(cores)} cores and no "
            'GPU; start fewer workers here, or share cores with devices = ["cpu:0", "cpu:0", …] in the plan'
        )
    return Device.parse(f"cpu:{cores[place.local_rank]}")


def _check(plan: Plan, path: Path, place: Place) -> None:
    wanted = plan.mesh.num_workers
    if place.num_workers != wanted:
        raise UsageError(
            f"{path} wants {wanted} workers ({plan.mesh}), but {place.num_workers} were started; "
            f"use torchrun --nproc-per-node {wanted} -m stagewright worker {path} (or several machines with --nnodes)"
        )
    if plan.devices and len(plan.devices) != wanted:
        raise UsageError(f"{path} names {len(plan.devices)} devices for {wanted} workers; name one for each")


def _check_host(plan: Plan, place: Place, job: Callable[..., None]) -> None:
    """Refuse, once a machine, a model that its workers can't build side by side."""
    if place.local_rank != 0 or not job.__module__.startswith("stagewright."):  # another's job may load no model
        return
    check_builds(plan.model, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class _Record:
    """Where this worker's fault is written, as soon as that is known."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.device = ""
        self.folder: Path | None = None
        self.watch: StoreWatch | None = None
        self._stacks: Any = None
        self._saving: threading.Thread | None = None
        self._lock = threading.Lock()

    def open(self, run_folder: Path) -> None:
        folder = self.folder = worker_folder(run_folder, self.place.rank)
        activity.open(folder / "activity.txt")
        with contextlib.suppress(UsageError):  # only those who watch want it
            ProcessMark.own().write(folder / "process.json")
        if self.place.launcher is not None and hasattr(signal, "SIGUSR1"):
            # The launcher asks a worker that hangs where it is; faulthandler answers even while the GIL is held.
            self._stacks = (folder / "stack.txt").open("w")
            faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=False)

    def write(self, fault: Fault) -> StagewrightError:
        if self.folder is not None:
            fault.write(self.folder / "error.json")
            if self.place.rank == 0 and self.place.launcher is None:  # no launcher does it
                with contextlib.suppress(OSError):
                    status: Status = "refused" if fault.exit_code == UsageError.exit_code else "failed"
                    RunFolder(self.folder.parents[1]).finish(status, {"error": fault.text()})
        tell_agent(fault)
        if self.watch is not None:
            self.watch.tell(fault)
        self.save_events()
        return fault.error()

    def save_events(self) -> None:
        """Write what was recorded and has not been written, for a trace of a run that fails; once, and not for long."""
        with self._lock:
            if self._saving is None:
                self._saving = threading.Thread(target=self._save, name="stagewright-save", daemon=True)
                self._saving.start()
        self._saving.join(SAVE_S)

    def _save(self) -> None:
        module = sys.modules.get("stagewright.engine.worker.recorder")  # not there: nothing was recorded
        if module is None or self.folder is None:
            return
        with contextlib.suppress(Exception):  # a device may be broken, a disk full: the fault itself is what counts
            rows = module.recorder.rest(activity.now())
            if rows:
                WorkerFolder(self.folder).write_events(rows, quickly=True)


@contextlib.contextmanager
def _faults(place: Place) -> Iterator[_Record]:
    """Write down whatever is raised inside, and raise it as one error."""
    record = _Record(place)
    try:
        yield record
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename == __file__:
            own = own.tb_next  # how the job was called says nothing about its failure
        error.with_traceback(own or error.__traceback__)
        fault = Fault.of(error, worker=place.rank, device=record.device, doing=activity.now(), time_ns=time.time_ns())
        raise record.write(fault) from error


def _follow_the_agent(place: Place) -> None:
    """One stream of output, and no life without the agent that started this process."""
    with contextlib.suppress(OSError):
        if os.path.sameopenfile(1, 2):  # the launcher opens one log file twice, each with a position of its own
            os.dup2(2, 1)
    if place.store is None:
        return
    # The agent ends its workers. A KeyboardInterrupt would wait until a blocked receive returns.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    launcher = multiprocessing.parent_process()  # not the process that this one is a copy of
    if launcher is not None and not launcher.is_alive():
        raise SystemExit(1)  # it ended before we asked to follow it


def _save_before_sigterm(record: _Record) -> None:
    """Let a thread write what was recorded before SIGTERM ends this process: the main one may be stuck in a peer."""
    if os.name != "posix":
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def noted(number: int, frame: Any) -> None:
        """The thread reads it from the pipe."""

    def wait() -> None:
        while word := os.read(reader, 1):
            if word[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is noted:  # not a job's own way
                record.save_events()
                ctypes.CDLL(None).signal(signal.SIGTERM, None)  # Python's is for the main thread alone
                os.kill(os.getpid(), signal.SIGTERM)

    # A child that a job forks is ended by its own SIGTERM, even its first, as it would be anywhere else.
    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    def forget() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, noted)
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=forget)
    threading.Thread(target=wait, name="stagewright-sigterm", daemon=True).start()


def connect(place: Place, hang_s: float) -> Store:
    """A connection of our own to the agent's store: the process group's blocks while that waits."""
    from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

    if place.store is None:
        return HashStore()
    host, port = place.store
    timeout = datetime.timedelta(seconds=max(hang_s, START_S))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store remembers the failure before a restart
    return PrefixStore(f"stagewright {attempt}", TCPStore(host, port, is_master=False, timeout=timeout))


def _agree_on_folder(store: Store, place: Place, plan: Plan) -> Path:
    """Worker 0 makes the run folder; other machines use the same name in their own working folder."""
    if place.rank == 0:
        store.set("run folder", str(RunFolder.create("runs", plan).path))
    return Path(store.get("run folder").decode())


def start_watch(store: Store, place: Place, device: Device, hang_s: float, end: Callable[[Fault], None]) -> StoreWatch:
    """Watch this worker and, through the store, the others."""
    watch = StoreWatch(store, worker=place.rank, device=device.text, activity=activity, hang_s=hang_s, end=end)
    watch.start()
    return watch


def _conclude(job: Callable[..., None], plan: Plan, store: Store, place: Place, folder: RunFolder) -> None:
    """Where no launcher does it, worker 0 gathers what the others wrote, on other machines too, and ends the run.

    A job's module may say how its workers' results become one: ``merge_results(plan, run_folder)``.
    """
    merge = getattr(sys.modules[job.__module__], "merge_results", None)
    for name in _GATHERED:
        if place.rank != 0:
            own = worker_folder(folder.path, place.rank) / name
            store.set(f"{name} {place.rank}", own.read_bytes() if own.is_file() else b"")  # type: ignore[arg-type]
            continue
        for rank in range(1, place.num_workers):
            content = store.get(f"{name} {rank}")
            path = worker_folder(folder.path, rank) / name
            if content and not path.is_file():  # another machine's
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    if place.rank != 0:
        return
    folder.finish("done", merge(folder.plan(), folder) if merge is not None else {})


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _load_job(path: str) -> Callable[..., None]:
    module, colon, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name) if colon else None
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the job {path!r} can't be loaded: {error}") from error
    if not callable(function):
        raise UsageError(f"{path!r} is not a job; write package.module:function")
    return function  # type: ignore[no-any-return]
