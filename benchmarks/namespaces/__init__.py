"""Two machines, as two network namespaces with a cable (veth) between them; needs root.

    namespace a  198.18.x.1 ══ veth ══ 198.18.x.2  namespace b        (198.18.0.0/15 is reserved for tests)

A token bucket (tc's tbf) shapes the cable. Namespaces, cable and processes are gone at the end of the block.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

PORT = 29517


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One of the two."""

    name: str
    interface: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Return a command that runs on this machine."""
        return ["ip", "netns", "exec", self.name, *words]


@contextlib.contextmanager
def two_machines(bits_per_s: float | None = None, buffer_s: float = 0.02) -> Iterator[tuple[Machine, Machine]]:
    """Create two machines; ``bits_per_s``: bandwidth of the cable in each direction, None for all that it can."""
    number = os.getpid()
    first = Machine(name=f"sw-a-{number}", interface=f"swa{number}"[:15], address=f"198.18.{number % 250}.1")
    second = replace(first, name=f"sw-b-{number}", interface=f"swb{number}"[:15], address=f"198.18.{number % 250}.2")
    try:
        for machine in (first, second):
            run_ip("netns", "add", machine.name)
        cable = [first.interface, "netns", first.name, "type", "veth", "peer", second.interface, "netns", second.name]
        run_ip("link", "add", *cable)
        for machine in (first, second):
            run_ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", machine.interface)
            run_ip("-n", machine.name, "link", "set", "lo", "up")
            run_ip("-n", machine.name, "link", "set", machine.interface, "up")
            if bits_per_s is not None:
                _shape(machine, bits_per_s, buffer_s)
        yield first, second
    finally:
        for machine in (first, second):
            end_processes(machine.name)


def end_processes(name: str) -> None:
    """End the processes in a namespace, and the namespace."""
    inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for pid in inside.stdout.split():  # only processes that were started on this machine
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)


def run_ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


def _shape(machine: Machine, bits_per_s: float, buffer_s: float) -> None:
    """Limit what a machine sends. The bucket is small, since what it holds passes at once: a message of 256 KiB
    would seem to have twice the bandwidth. It holds a few frames, so frames are jumbo ones.
    """
    burst = max(bits_per_s / 8 * 2e-4, 2**14)
    queue = max(bits_per_s / 8 * buffer_s, 2**18)
    run_ip("-n", machine.name, "link", "set", machine.interface, "mtu", "9000")
    words = ["rate", f"{bits_per_s:.0f}bit", "burst", f"{burst:.0f}", "limit", f"{queue:.0f}"]
    command = ["tc", "-n", machine.name, "qdisc", "add", "dev", machine.interface, "root", "tbf", *words]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def run_workers(
    machines: Sequence[Machine],
    plan: Path,
    *words: str,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    limit_s: float = 300,
    on_poll: Callable[[], None] = lambda: None,
) -> list[tuple[int, str, float]]:
    """Run a plan with one ``torchrun`` on each machine; return exit codes, standard errors and times of the ends."""
    started = []
    with contextlib.ExitStack() as stack:
        for rank, machine in enumerate(machines):
            errors = stack.enter_context(open((folder or plan.parent) / f"torchrun-{rank}.txt", "w+"))
            command = machine.command(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(machines)))
            command += ["--node-rank", str(rank), "--nproc-per-node", "1", "--max-restarts", "0"]
            command += ["--master-addr", machines[0].address, "--master-port", str(PORT)]
            command += ["-m", "stagewright", "worker", str(plan), *words]
            process = subprocess.Popen(
                command,
                cwd=folder or plan.parent,
                env={**os.environ, "GLOO_SOCKET_IFNAME": machine.interface, **(environment or {})},
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
            started.append((process, errors))
        ends: dict[int, float] = {}
        until_s = time.monotonic() + limit_s
        try:
            while len(ends) < len(started) and time.monotonic() < until_s:
                for rank, (process, _) in enumerate(started):
                    if rank not in ends and process.poll() is not None:
                        ends[rank] = time.time()
                on_poll()
                time.sleep(0.02)
        finally:
            for process, _ in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        found = []
        for rank, (process, errors) in enumerate(started):
            errors.seek(0)
            found.append((process.returncode, errors.read(), ends.get(rank, time.time())))
        return found
