"""torch's elastic agent, as in ``torchrun``, for one machine, with hang detection and a quick shutdown.

Twenty times a second it checks exit codes, the action counts in the workers' mapped files and the time limit. The first
worker that fails, a hang or the time limit ends all workers: SIGTERM, two seconds later SIGKILL, to whole process
groups. Nothing is restarted. Only this file uses private parts of the agent; a test pins what it relies on.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from stagewright.engine.launch.fork_server import fork_server_runs, forked_workers, replaced_handlers, stop_fork_server
from stagewright.engine.worker.faults import Doing, Fault, FaultKind, read_doing, read_reserved_fault, worker_folder
from stagewright.engine.worker.placement import LAUNCHER
from stagewright.engine.worker.process import is_stopped
from stagewright.engine.worker.watchdog import STARTING, ProgressClock, blame
from stagewright.machine.host_memory import oom_kills

LOOPBACK = "127.0.0.1"
POLL_S = 0.05
LOG_LINES = 15  # of a worker that ended without an error report
_SETTLE_S = 1.0  # how long a lost connection waits for the fault that caused it
_FOLDER_S = 1.0  # how often the run folder is looked for
_NO_FORK_SERVER = 255  # multiprocessing's exit code of a worker whose fork server is gone
_TERM_S = 2.0
_KILL_S = 5.0


class Loopback(RendezvousHandler):
    """Rendezvous on one machine: a store in this process, on a free port of the loopback interface."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        return True  # workers connect to it instead of hosting another

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        # The store takes over the open socket, so no other process can take the port in between.
        self._store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )
        info = RendezvousStoreInfo(master_addr=LOOPBACK, master_port=port)
        return RendezvousInfo(PrefixStore("agent", self._store), 0, 1, info)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "local"

    def shutdown(self) -> bool:
        self._store = None
        return True


class _Logs(LogsSpecs):
    """Send each worker's output to its log in the run folder, and mark its environment."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for environment in envs.values():
            # Variables that changed since the fork server was started.
            environment |= {name: value for name, value in os.environ.items() if name not in environment}
            environment[LAUNCHER] = str(os.getpid())
        # Standard output and error are opened apart; the worker joins them.
        files = {local: str(worker_folder(self._folder, local) / "log.txt") for local in envs}
        return LogsDest(stdouts=files, stderrs=dict(files), error_files=dict.fromkeys(envs, os.devnull))


class Supervisor(LocalElasticAgent):
    """Runs the workers; torch's agent waits 30 s for a stopped process and does not detect hangs."""

    def __init__(
        self,
        spec: WorkerSpec,
        folder: Path,
        *,
        devices: Sequence[str],
        hang_s: float,
        timeout_s: float | None,
        on_poll: Callable[[], None] | None,
    ) -> None:
        # Forked workers save the seconds that each would need to import torch.
        super().__init__(spec, _Logs(folder), start_method="forkserver")
        self.faults: list[Fault] = []
        """Faults of workers that ended by themselves."""
        self.verdict: Fault | None = None
        """The fault that ended the run, if no worker ended by itself."""
        self._folder, self._num_workers, self._devices = folder, spec.local_world_size, devices
        self._timeout_s = timeout_s
        self._on_poll = on_poll
        self._all_ended = False
        self._kills = oom_kills()
        self._begun_s = time.monotonic()
        self._clock = ProgressClock(hang_s, self._begun_s)
        self._folder_checked_s = self._begun_s

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        try:
            with forked_workers():
                started: dict[int, Any] = super()._start_workers(worker_group)
                return started
        except BaseException:
            stop_fork_server()  # or it forks, seconds later, a worker that nothing waits for
            raise

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._failed():
            for _ in range(round(_SETTLE_S / POLL_S)):
                self.faults = [self._fault_of(worker) for worker in self._failed()]
                if any(fault.kind != "lost-peer" for fault in self.faults):
                    break
                time.sleep(POLL_S)
            self.verdict = self._lost_folder(at_once=True)  # workers that write there fail before it is looked for
            self.end_all()
        else:
            self.verdict = self._hang() or self._overdue() or self._lost_folder()
            if self.verdict is not None:
                self.end_all()
            elif self._on_poll is not None:
                self._on_poll()
        result = self._poll(worker_group)
        if result.is_failed() and not self.faults and self.verdict is None:
            # A worker failed after the check above, and the agent has sent SIGTERM to the others.
            self.faults = [self._fault_of(worker) for worker in self._failed()]
            self.faults = [fault for fault in self.faults if fault.message != signal.SIGTERM.name] or self.faults
            self.verdict = self._lost_folder(at_once=True)
            self.end_all()
        return result

    def _poll(self, worker_group: WorkerGroup) -> RunResult:
        """Ask torch's agent; a worker that was killed while it wrote its error for torch has failed, too."""
        try:
            result: RunResult = super()._monitor_workers(worker_group)
        except (EOFError, pickle.UnpicklingError):
            return RunResult(state=WorkerState.FAILED)
        return result

    def _shutdown(self, *args: Any, **options: Any) -> None:
        self.end_all()
        super()._shutdown(*args, **options)

    def end_all(self) -> None:
        """End every worker with its children; return when they are gone."""
        processes = self._processes()
        if not processes or self._all_ended:
            return
        # Ignore a second Ctrl-C meanwhile: this takes seconds.
        with replaced_handlers((signal.SIGINT, signal.SIGTERM), signal.SIG_IGN):
            if any(process.exitcode is None for process in processes):
                for process in processes:
                    if process.exitcode is None:
                        _signal_group(process, signal.SIGTERM)
                        _signal_group(process, signal.SIGCONT)  # a stopped process takes no other signal
                _wait(processes, _TERM_S)
            for process in processes:
                _signal_group(process, signal.SIGKILL)  # also children that outlived their worker
            _wait(processes, _KILL_S)
        self._all_ended = True

    def close(self) -> None:
        """End all workers and close the store, even while a traceback still references this agent."""
        self.end_all()
        self._store = None
        self._worker_group.store = None
        self._rdzv_handler.shutdown()

    def _processes(self) -> list[Any]:
        started = getattr(self._pcontext, "_pc", None)
        return list(started.processes) if started is not None else []

    def _failed(self) -> list[int]:
        return [worker for worker, process in enumerate(self._processes()) if self._has_failed(worker, process)]

    def _has_failed(self, worker: int, process: Any) -> bool:
        """Whether a worker has ended with an error, or without one before its job was done: ``os._exit(0)``."""
        if process.exitcode == 0:
            return self._doing(worker).action not in ("finish", "")
        return process.exitcode is not None

    def _fault_of(self, worker: int) -> Fault:
        """Return the fault of a worker that has ended: the one it wrote, or one from its exit code."""
        folder = worker_folder(self._folder, worker)
        fault = Fault.read(folder / "error.json") or read_reserved_fault(folder / "activity.txt")
        if fault is not None:
            return fault
        code = self._processes()[worker].exitcode
        if code == _NO_FORK_SERVER and not fork_server_runs():
            return self._fault(None, "killed", "its fork server, from which the workers are forked, is gone")
        if code < 0:
            name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
            return self._fault(worker, "killed", name + (self._about_memory() if name == "SIGKILL" else ""))
        log = folder / "log.txt"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        early = "" if code else " before its job was done"
        return self._fault(worker, "exited", f"exit code {code}{early}", "\n".join(lines[-LOG_LINES:]))

    def _about_memory(self) -> str:
        """Say whether the system's OOM killer ended a worker, as far as that is known."""
        if oom_kills() == self._kills:
            return " (the system may have run out of memory)"
        return (
            f" (the system ran out of memory and killed a process; each of {self._num_workers} workers "
            "builds the whole model before it keeps its part: use fewer here, a smaller batch or more machines)"
        )

    def _fault(self, worker: int | None, kind: FaultKind, message: str, where: str = "") -> Fault:
        return Fault(
            worker=worker,
            kind=kind,
            message=message,
            device=self._devices[worker] if worker is not None and self._devices else "",
            doing=Doing() if worker is None else self._doing(worker),
            traceback=where,
            time_ns=time.time_ns(),
        )

    def _doing(self, worker: int) -> Doing:
        return read_doing(worker_folder(self._folder, worker) / "activity.txt")

    def _hang(self) -> Fault | None:
        processes = self._processes()
        doings = [self._doing(worker) for worker in range(len(processes))]
        running = [process.exitcode is None for process in processes]
        progress = sum(doing.count for doing in doings) + running.count(False)
        starting = any(doing.action in STARTING for doing in doings)
        still_s = self._clock.overdue(progress, time.monotonic(), starting=starting)
        if still_s is None:
            return None
        stopped = [is_stopped(process.pid) for process in processes]
        worker = blame(doings, stopped, running)
        message = f"no worker has made progress for {still_s:.0f} s"
        where = (
            "\n".join(f"  worker {rank} is at: {doing}" for rank, doing in enumerate(doings) if rank != worker) + "\n"
        )
        if stopped[worker]:
            message += "; its process is stopped (SIGSTOP or a debugger)"
        else:
            where += self._ask_for_stack(worker, processes[worker].pid)
        return self._fault(worker, "hung", message, where)

    def _overdue(self) -> Fault | None:
        if self._timeout_s is None or time.monotonic() - self._begun_s < self._timeout_s:
            return None
        return self._fault(None, "overdue", f"it took longer than its time limit of {self._timeout_s:g} s")

    def _lost_folder(self, *, at_once: bool = False) -> Fault | None:
        now_s = time.monotonic()
        if now_s - self._folder_checked_s < _FOLDER_S and not at_once:
            return None
        self._folder_checked_s = now_s
        if all((self._folder / name).exists() for name in ("plan.toml", "workers")):
            return None
        return self._fault(None, "raised", f"its folder {self._folder} was deleted or moved")

    def _ask_for_stack(self, worker: int, pid: int) -> str:
        """Ask a worker for its stack; empty where it does not answer."""
        path = worker_folder(self._folder, worker) / "stack.txt"
        if not path.exists():
            return ""  # its signal handler is not set up yet: the signal would kill it
        os.kill(pid, signal.SIGUSR1)
        for _ in range(10):
            time.sleep(POLL_S)
            if path.stat().st_size:
                break
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(line for line in lines if "<frozen " not in line)  # without the import system


def _signal_group(process: Any, number: signal.Signals) -> None:
    """Send a signal to a worker's process group; to the worker alone where it does not lead a group yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            if process.exitcode is None:
                os.kill(process.pid, number)


def _wait(processes: list[Any], limit_s: float) -> None:
    until_s = time.monotonic() + limit_s
    while any(process.exitcode is None for process in processes) and time.monotonic() < until_s:
        time.sleep(0.01)
