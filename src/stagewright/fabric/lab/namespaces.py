"""Lifetime of a lab: creation, commands in it, removal, and cleanup of labs whose owner was killed.

    namespaces     sw-lab-<pid>-<start>-s          the switch: a bridge, or the user-space switch
                   sw-lab-<pid>-<start>-0 …        the hosts, each with eth0
    folder         <tmp>/sw-lab-<pid>-<start>/     lab.json, lateness

Names contain the owner's process id and start time. Everything lives inside these namespaces, so removing them removes
everything. Creating a lab first removes labs whose owner no longer exists.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stagewright.errors import RunError, RunTerminated, UsageError
from stagewright.fabric.lab.kernel import (
    check_root,
    die_with_parent,
    disable_offloads,
    drop_filter,
    has_netem,
    in_namespace,
    run_tool,
)
from stagewright.fabric.lab.network import LabNetwork
from stagewright.fabric.ranks.connections import check_congestion
from stagewright.fabric.trials import TrialTable

ENVIRONMENT = "STAGEWRIGHT_FABRIC_LAB"
_NAME = re.compile(r"sw-lab-(\d+)-(\d+)(?:-\w+)?")
_NETNS = Path("/run/netns")
_QUEUE_BYTES = 3 * 2**20
_BURST_S = 1e-3  # burst after a pause; with less, a late timer reduces the rate
_MASTER_PORT = 29531
_INTERRUPTED_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LabView:
    """A lab as seen by the commands in it."""

    hosts: tuple[Mapping[str, str], ...]
    """Namespace and address of each host."""
    network: Mapping[str, Any]
    """Settings of the network and how they are implemented."""
    lateness: str | None
    """The switch's log of late frames; None if the kernel implements the delay."""

    def late_trials(self, trials: TrialTable) -> npt.NDArray[np.bool_]:
        """Return which trials ran while the switch was late."""
        void = np.zeros(trials.num_trials, dtype=np.bool_)
        if self.lateness is None or not trials.num_trials:
            return void
        try:
            records = np.fromfile(self.lateness, dtype=np.dtype([("when_s", "<f8"), ("late_s", "<f8")]))
        except OSError:
            return void
        when = np.sort(records["when_s"])
        begin = trials.rows["start_s"].min(axis=(1, 2))
        end = (trials.rows["start_s"] + trials.rows["duration_s"]).max(axis=(1, 2))
        late: npt.NDArray[np.bool_] = np.searchsorted(when, end, side="right") > np.searchsorted(when, begin)
        return late


def current_lab() -> LabView | None:
    """Return the lab in which this process runs, if any."""
    path = os.environ.get(ENVIRONMENT)
    if not path:
        return None
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return LabView(hosts=tuple(content["hosts"]), network=content["network"], lateness=content["lateness"])
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{ENVIRONMENT}={path} is not a running lab ({error}); unset it or start a new lab") from None


class Lab:
    """Context manager that creates and removes the namespaces of a lab."""

    def __init__(self, network: LabNetwork) -> None:
        self.network = network
        self.tag = f"sw-lab-{os.getpid()}-{_start_time(os.getpid())}"
        self.folder = Path(tempfile.gettempdir()) / self.tag
        self.methods: list[str] = []
        self._switch: subprocess.Popen[str] | None = None

    @property
    def switch_namespace(self) -> str:
        return f"{self.tag}-s"

    def namespace(self, host: int) -> str:
        return f"{self.tag}-{host}"

    def __enter__(self) -> Lab:
        try:
            self._create()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Kill the processes in the namespaces and remove them."""
        if self._switch is not None:
            self._switch.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._switch.wait(2.0)
        _remove(self.tag)

    @property
    def lateness_path(self) -> Path:
        return self.folder / "lateness"

    def _create(self) -> None:
        network, hosts = self.network, range(self.network.num_hosts)
        self.folder.mkdir(mode=0o755)
        for name in (self.switch_namespace, *(self.namespace(host) for host in hosts)):
            run_tool(["ip", "netns", "add", name])
        netem = (network.delay_s > 0 or network.has_loss) and has_netem(self.switch_namespace)
        user_space = network.delay_s > 0 and not netem
        lines = [] if user_space else ["link add br0 type bridge", "link set br0 up"]
        for host in hosts:
            lines += [
                f"link add p{host} type veth peer name eth0 netns {self.namespace(host)}",
                f"link set p{host} mtu {network.mtu}" + ("" if user_space else " master br0"),
                f"link set p{host} up",
            ]
        run_tool(["ip", "-n", self.switch_namespace, "-batch", "-"], "\n".join(lines) + "\n")
        timeout = "" if network.rto_min_s is None else f" rto_min {max(1, round(network.rto_min_s * 1e3))}ms"
        pinned = f"congctl {network.congestion}{timeout}"
        for host in hosts:
            lines = [
                "link set lo up",
                f"link set eth0 address {network.mac(host)}",
                f"link set eth0 mtu {network.mtu} gso_max_size {network.max_packet_bytes(host)}",
                f"addr add {network.address(host)}/24 dev eth0",
                "link set eth0 up",
                f"route replace 198.18.0.0/24 dev eth0 src {network.address(host)} {pinned}",
            ]
            lines += [
                f"neigh replace {network.address(other)} lladdr {network.mac(other)} dev eth0 nud permanent"
                for other in hosts
                if other != host
            ]
            run_tool(["ip", "-n", self.namespace(host), "-batch", "-"], "\n".join(lines) + "\n")
        if network.has_loss and not netem:
            in_namespace(self.switch_namespace, lambda: disable_offloads(*(f"p{host}" for host in hosts)))
            for host in hosts:
                in_namespace(self.namespace(host), lambda: disable_offloads("eth0"))
        for host in hosts:
            self._shape(self.namespace(host), "eth0", host, network.losses_out[host] if netem else 0.0, netem)
            self._shape(self.switch_namespace, f"p{host}", host, network.losses[host], netem)
            if network.losses_out[host] and not netem and not user_space:
                # Drop at the switch's ingress: TCP notices drops on the sender's device and waits.
                self._drop(f"p{host}", "ingress", network.losses_out[host])
        if user_space:
            self._start_switch()
        self._describe(netem, user_space)
        view = {
            "hosts": [{"namespace": self.namespace(host), "address": network.address(host)} for host in hosts],
            "network": {**asdict(network), "used": self.methods},
            "lateness": str(self.lateness_path) if user_space else None,
        }
        (self.folder / "lab.json").write_text(json.dumps(view, indent=2) + "\n", encoding="utf-8")

    def _shape(self, namespace: str, device: str, host: int, loss: float, netem: bool) -> None:
        """Configure rate, delay and loss of one direction of a link."""
        network, rate = self.network, self.network.rates[host]
        parent = ["root", "handle", "1:"]
        lines = []
        if rate is not None:
            # tbf segments packets longer than its burst, which is too slow.
            senders = [host] if device == "eth0" else range(network.num_hosts)
            largest = max(network.max_packet_bytes(sender) for sender in senders)
            burst = max(largest, round(rate * _BURST_S)) + 2 * network.mtu
            arguments = f"rate {round(rate * 8)}bit burst {burst} limit {_QUEUE_BYTES}"
            lines.append(f"qdisc add dev {device} {' '.join(parent)} tbf {arguments}")
            parent = ["parent", "1:1", "handle", "10:"]
        if netem:
            # Half of the delay on each of the two devices that a packet passes.
            arguments = f"delay {network.delay_s / 2 * 1e6:.0f}us loss {loss * 100:.6f}% limit 100000"
            lines.append(f"qdisc add dev {device} {' '.join(parent)} netem {arguments}")
        if lines:
            run_tool(["tc", "-n", namespace, "-batch", "-"], "\n".join(lines) + "\n")
        if loss and not netem:
            self._drop(device, "egress", loss)

    def _drop(self, device: str, direction: str, loss: float) -> None:
        """Drop a fraction of the packets at a port of the switch."""
        arguments = ["tc", "-n", self.switch_namespace]
        with contextlib.suppress(RunError):  # exists for the other direction
            run_tool([*arguments, "qdisc", "add", "dev", device, "clsact"])
        program = ["bpf", "direct-action", "bytecode", drop_filter(loss)]
        run_tool([*arguments, "filter", "add", "dev", device, direction, "protocol", "ip", *program])

    def _start_switch(self) -> None:
        network = self.network
        arguments = ["ip", "netns", "exec", self.switch_namespace]
        arguments += [sys.executable, "-m", "stagewright.fabric.lab.switch"]
        arguments += [repr(network.delay_s), repr(self.tolerance_s), str(self.lateness_path)]
        arguments += [f"p{host}={network.losses_out[host]!r}" for host in range(network.num_hosts)]
        self._switch = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, encoding="utf-8"
        )
        assert self._switch.stdout is not None
        if self._switch.stdout.readline().strip() != "ready":
            _, stderr = self._switch.communicate(timeout=5.0)
            raise RunError(f"the user-space switch did not start: {(stderr or '').strip().splitlines()[-1:]}")

    @property
    def tolerance_s(self) -> float:
        """Lateness of a frame that voids its trial."""
        return max(1e-3, 0.2 * self.network.delay_s)

    def _describe(self, netem: bool, user_space: bool) -> None:
        network = self.network
        self.methods = [
            f"namespaces {self.tag}-0 … {network.num_hosts - 1}, " + ("packet sockets" if user_space else "bridge")
        ]
        if any(rate is not None for rate in network.rates):
            self.methods.append("rate by tbf on both ends of each link")
        if network.delay_s:
            how = (
                "netem"
                if netem
                else "a user-space switch (this kernel has no netem), which voids trials while it is late"
            )
            self.methods.append(f"delay by {how}")
        if network.has_loss:
            self.methods.append("loss by " + ("netem" if netem else "random drops (BPF in tc), offloads off"))
        timeout = "" if network.rto_min_s is None else f", rto_min {network.rto_min_s * 1e3:g} ms"
        self.methods.append(f"congestion control {network.congestion}{timeout} set on every route")

    def lateness(self) -> tuple[int, float]:
        """Return the number of late frames and the largest lateness."""
        if not self.lateness_path.exists():
            return 0, 0.0
        records = np.fromfile(self.lateness_path, dtype="<f8").reshape(-1, 2)
        return len(records), float(records[:, 1].max()) if len(records) else 0.0


@contextlib.contextmanager
def open_lab(network: LabNetwork) -> Iterator[Lab]:
    """Open a lab for a block; remove it also on SIGTERM and SIGHUP."""
    check_root()
    check_congestion(network.congestion)
    remove_orphans()

    def end(number: int, frame: object) -> None:
        raise RunTerminated(f"the lab was stopped by {signal.Signals(number).name}")

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with Lab(network) as lab:
            yield lab
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_in_lab(
    network: LabNetwork,
    command: Sequence[str],
    *,
    each: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> int:
    """Run a command in a new lab; return its exit code (the first that is not 0)."""
    if shutil.which(command[0]) is None:
        raise UsageError(f"command {command[0]!r} not found")
    with open_lab(network) as lab:
        report(f"lab: {network.describe()}")
        for line in lab.methods:
            report(f"lab: {line}")
        environment = {**os.environ, ENVIRONMENT: str(lab.folder / "lab.json")}
        processes = []
        try:
            if each:
                for host in range(network.num_hosts):
                    variables = {
                        "RANK": str(host),
                        "LOCAL_RANK": "0",
                        "WORLD_SIZE": str(network.num_hosts),
                        "MASTER_ADDR": network.address(0),
                        "MASTER_PORT": str(_MASTER_PORT),
                        "GLOO_SOCKET_IFNAME": "eth0",
                        "NCCL_SOCKET_IFNAME": "eth0",
                    }
                    arguments = ["ip", "netns", "exec", lab.namespace(host), *command]
                    processes.append(_start(arguments, {**environment, **variables}))
            else:
                processes.append(_start(command, environment))
            code = _wait(processes)
        except KeyboardInterrupt:
            # The command received Ctrl-C too: let it save its results.
            with contextlib.suppress(KeyboardInterrupt):
                _wait(processes, time.monotonic() + _INTERRUPTED_S)
            raise
        finally:
            for process in processes:
                if process.poll() is None:
                    process.terminate()
            for process in processes:
                try:
                    process.wait(5.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        count, worst_s = lab.lateness()
        if count:
            report(f"lab: the switch sent {count} frames late, by up to {worst_s * 1e3:.3g} ms")
        return code


def _start(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(list(arguments), env=dict(environment), preexec_fn=die_with_parent)


def _wait(processes: list[subprocess.Popen[bytes]], until_s: float = math.inf) -> int:
    """Wait until all processes exit, one fails, or the time is over."""
    while time.monotonic() < until_s:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.02)
    return 1


def remove_orphans() -> list[str]:
    """Remove the labs whose owner no longer exists; return their names."""
    orphans = set()
    for folder in (_NETNS, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            for entry in folder.iterdir():
                match = _NAME.fullmatch(entry.name)
                if match and _start_time(int(match[1])) != match[2]:
                    orphans.add(f"sw-lab-{match[1]}-{match[2]}")
    for tag in orphans:
        _remove(tag)
    return sorted(orphans)


def _remove(tag: str) -> None:
    names = []
    with contextlib.suppress(OSError):
        names = [entry.name for entry in _NETNS.iterdir() if entry.name.startswith(f"{tag}-")]
    for name in names:
        result = subprocess.run(["ip", "netns", "pids", name], capture_output=True, encoding="utf-8", check=False)
        for number in result.stdout.split():
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(number), signal.SIGKILL)
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    shutil.rmtree(Path(tempfile.gettempdir()) / tag, ignore_errors=True)


def _start_time(pid: int) -> str:
    """Return a process's start time in ticks after boot; empty if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]
