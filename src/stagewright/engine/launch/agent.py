"""torch's elastic agent, the one behind ``torchrun``, for one machine: with an eye on progress and a quick hand.

Twenty times a second it looks at exits, at the counts of actions in the workers' mapped files and at the clock. The
first worker that fails, a hang or the time limit ends them all: SIGTERM, two seconds later SIGKILL, to whole process
groups. Nothing is restarted. This is the one file that reaches into the agent; a test holds what it relies on.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from stagewright.engine.launch.fork_server import end_importing, imported_ahead
from stagewright.engine.worker.faults import Doing, Fault, FaultKind, read_doing, worker_folder
from stagewright.engine.worker.watchdog import STARTING, ProgressClock, blame, is_stopped
from stagewright.engine.worker.worker import LAUNCHER
from stagewright.machine.host_memory import kills_for_memory
from stagewright.spec.plan import Plan

__all__ = ["LOOPBACK", "POLL_S", "Agent", "Loopback"]

LOOPBACK = "127.0.0.1"
POLL_S = 0.05
_SETTLE_S = 1.0  # a worker that only lost a connection waits so long for the one that was the cause
_TERM_S = 2.0
_KILL_S = 5.0


class Loopback(RendezvousHandler):
    """One machine, nothing to agree on: a store in this process, on a port of the loopback that is ours at once."""

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
        # The store takes over the socket: no moment at which another process could take the port.
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
    """Each worker's output goes to its file in the run folder, with our own word in its environment."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for environment in envs.values():
            # What changed since the process was started of which workers are copies.
            environment |= {name: value for name, value in os.environ.items() if name not in environment}
            environment[LAUNCHER] = str(os.getpid())
        # Standard output and error are opened apart; the worker joins them.
        files = {local: str(worker_folder(self._folder, local) / "log.txt") for local in envs}
        return LogsDest(stdouts=files, stderrs=dict(files), error_files=dict.fromkeys(envs, os.devnull))


class Agent(LocalElasticAgent):
    """Runs the workers; stock, it waits half a minute for a stopped process and never asks whether anything goes on."""

    def __init__(
        self,
        spec: WorkerSpec,
        folder: Path,
        plan: Plan,
        *,
        hang_s: float,
        timeout_s: float | None,
        on_poll: Callable[[], None] | None,
    ) -> None:
        # Workers are copies of one process that has imported what they need, seconds each.
        super().__init__(spec, _Logs(folder), start_method="forkserver")
        self.faults: list[Fault] = []
        """Of workers that ended by themselves."""
        self.verdict: Fault | None = None
        """What ended the run, if it was not a worker's end."""
        self._folder, self._plan = folder, plan
        self._timeout_s = timeout_s
        self._on_poll = on_poll
        self._all_ended = False
        self._kills = kills_for_memory()
        self._begun_s = time.monotonic()
        self._clock = ProgressClock(hang_s, self._begun_s)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        try:
            with imported_ahead():
                started: dict[int, Any] = super()._start_workers(worker_group)
                return started
        except BaseException:
            end_importing()  # or it makes, seconds later, a worker that no one waits for
            raise

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._failed():
            settled_s = time.monotonic() + _SETTLE_S
            while self._only_lost_peers() and time.monotonic() < settled_s:
                time.sleep(POLL_S)
            self.faults = [self._fault_of(worker) for worker in self._failed()]
            self.end_all()
        else:
            self.verdict = self._hang() or self._overdue()
            if self.verdict is not None:
                self.end_all()
            elif self._on_poll is not None:
                self._on_poll()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed() and not self.faults and self.verdict is None:
            # A worker failed after we had looked, and the agent has sent SIGTERM to the others.
            self.faults = [self._fault_of(worker) for worker in self._failed()]
            self.faults = [one for one in self.faults if one.message != signal.SIGTERM.name] or self.faults
            self.end_all()
        return result

    def _shutdown(self, *args: Any, **options: Any) -> None:
        self.end_all()
        super()._shutdown(*args, **options)

    def end_all(self) -> None:
        """End every worker with its children; returns when they are gone."""
        processes = self._processes()
        if not processes or self._all_ended:
            return
        with _uninterrupted():
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
        """End what is left and close the store, even while someone holds on to this agent (as a traceback does)."""
        self.end_all()
        self._store = None
        self._worker_group.store = None
        self._rdzv_handler.shutdown()

    def _processes(self) -> list[Any]:
        started = getattr(self._pcontext, "_pc", None)
        return list(started.processes) if started is not None else []

    def _failed(self) -> list[int]:
        return [worker for worker, process in enumerate(self._processes()) if process.exitcode not in (None, 0)]

    def _only_lost_peers(self) -> bool:
        return all(self._fault_of(worker).kind == "lost-peer" for worker in self._failed())

    def _fault_of(self, worker: int) -> Fault:
        """The fault of a worker that has ended: its own words, or what its exit code tells."""
        own = Fault.read(worker_folder(self._folder, worker) / "error.json")
        if own is not None:
            return own
        code = self._processes()[worker].exitcode
        if code < 0:
            name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
            return self._fault(worker, "killed", name + (self._about_memory() if name == "SIGKILL" else ""))
        return self._fault(worker, "exited", f"exit code {code}", _tail(worker_folder(self._folder, worker)))

    def _about_memory(self) -> str:
        """Whether it was the system that killed a worker, as far as that can be told."""
        if kills_for_memory() == self._kills:
            return " (the system may have run out of memory)"
        return (
            f" (the system ran out of memory and killed a process; each of {self._plan.mesh.num_workers} workers "
            "builds the whole model before it keeps its part: use fewer here, a smaller batch or more machines)"
        )

    def _fault(self, worker: int | None, kind: FaultKind, message: str, where: str = "") -> Fault:
        known = worker is not None and worker < len(self._plan.devices)
        return Fault(
            worker=worker,
            kind=kind,
            message=message,
            device=self._plan.devices[worker] if worker is not None and known else "",
            doing=self._doing(worker) if worker is not None else Doing(),
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
        where = "\n".join(f"  worker {one} is at: {doing}" for one, doing in enumerate(doings) if one != worker) + "\n"
        if stopped[worker]:
            message += "; its process is stopped (SIGSTOP or a debugger)"
        else:
            where += self._ask_where(worker, processes[worker].pid)
        return self._fault(worker, "hung", message, where)

    def _overdue(self) -> Fault | None:
        if self._timeout_s is None or time.monotonic() - self._begun_s < self._timeout_s:
            return None
        return self._fault(None, "overdue", f"it took longer than its time limit of {self._timeout_s:g} s")

    def _ask_where(self, worker: int, pid: int) -> str:
        """Let a worker write down where it is; empty where it does not answer."""
        path = worker_folder(self._folder, worker) / "stack.txt"
        if not path.exists():
            return ""  # it is not ready to be asked: the signal would kill it
        os.kill(pid, signal.SIGUSR1)
        for _ in range(10):
            time.sleep(POLL_S)
            if path.stat().st_size:
                break
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(line for line in lines if "<frozen " not in line)  # not the import system's own


def _signal_group(process: Any, number: signal.Signals) -> None:
    """To the process group that a worker leads; where it has just begun and leads none yet, to the worker."""
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


def _tail(folder: Path, num_lines: int = 15) -> str:
    """The end of a worker's log."""
    try:
        lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-num_lines:])


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C does not keep us from cleaning up, which takes seconds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
