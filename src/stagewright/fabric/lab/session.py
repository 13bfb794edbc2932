"""A lab from its making to its removal, and what is left of labs whose owner was killed.

    namespaces     sw-lab-<pid>-<start>-s          the switch: a bridge, or the user-space switch
                   sw-lab-<pid>-<start>-0 …        the hosts, each with eth0
    folder         <tmp>/sw-lab-<pid>-<start>/     lab.json, lateness

Names carry the owner's process id and when it started. Nothing is made outside of these namespaces, so removing them
removes everything; a new lab first removes what belongs to owners that are no longer there.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stagewright.errors import RunError, UsageError
from stagewright.fabric.lab.kernel import (
    die_with_parent,
    drop_filter,
    has_netem,
    in_namespace,
    need_root,
    offloads_off,
    run_tool,
)
from stagewright.fabric.lab.network import LabNetwork
from stagewright.fabric.ranks.connections import check_congestion
from stagewright.fabric.trials import TrialTable

__all__ = ["ENVIRONMENT", "Lab", "LabView", "current_lab", "make_lab", "remove_ownerless", "run_in_lab"]

ENVIRONMENT = "STAGEWRIGHT_FABRIC_LAB"
_NAME = re.compile(r"sw-lab-(\d+)-(\d+)(?:-\w+)?")
_NETNS = Path("/run/netns")
_QUEUE_BYTES = 3 * 2**20
_BURST_S = 1e-3  # what a link may send at once after a pause; with less, a timer that is late costs rate
_MASTER_PORT = 29531
_INTERRUPTED_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LabView:
    """A lab as the commands in it see it."""

    hosts: tuple[Mapping[str, str], ...]
    """Of each host: namespace and address."""
    network: Mapping[str, Any]
    """What was asked for and how it was made."""
    lateness: str | None
    """Where the switch notes its lateness; None where the kernel delays."""

    def late_trials(self, trials: TrialTable) -> npt.NDArray[np.bool_]:
        """Which trials ran while the switch was late."""
        void = np.zeros(trials.num_trials, dtype=np.bool_)
        if self.lateness is None or not trials.num_trials:
            return void
        try:
            noted = np.fromfile(self.lateness, dtype=np.dtype([("when_s", "<f8"), ("late_s", "<f8")]))
        except OSError:
            return void
        when = np.sort(noted["when_s"])
        begin = trials.rows["start_s"].min(axis=(1, 2))
        end = (trials.rows["start_s"] + trials.rows["duration_s"]).max(axis=(1, 2))
        late: npt.NDArray[np.bool_] = np.searchsorted(when, end, side="right") > np.searchsorted(when, begin)
        return late


def current_lab() -> LabView | None:
    """The lab in which this process was started, if any."""
    path = os.environ.get(ENVIRONMENT)
    if not path:
        return None
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return LabView(hosts=tuple(content["hosts"]), network=content["network"], lateness=content["lateness"])
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{ENVIRONMENT}={path} is no lab that runs ({error}); unset it, or start a new lab") from None


class Lab:
    """The namespaces of one lab; a context manager."""

    def __init__(self, network: LabNetwork) -> None:
        self.network = network
        self.tag = f"sw-lab-{os.getpid()}-{_started(os.getpid())}"
        self.folder = Path(tempfile.gettempdir()) / self.tag
        self.used: list[str] = []
        self._switch: subprocess.Popen[str] | None = None

    @property
    def switch_namespace(self) -> str:
        return f"{self.tag}-s"

    def namespace(self, host: int) -> str:
        return f"{self.tag}-{host}"

    def __enter__(self) -> Lab:
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """End what runs in the namespaces, and remove them."""
        if self._switch is not None:
            self._switch.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._switch.wait(2.0)
        _remove(self.tag)

    @property
    def lateness_path(self) -> Path:
        return self.folder / "lateness"

    def _make(self) -> None:
        network, hosts = self.network, range(self.network.num_hosts)
        self.folder.mkdir(mode=0o755)
        for name in (self.switch_namespace, *(self.namespace(host) for host in hosts)):
            run_tool(["ip", "netns", "add", name])
        netem = (network.delay_s > 0 or network.loses) and has_netem(self.switch_namespace)
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
                f"link set eth0 mtu {network.mtu} gso_max_size {network.longest_bytes(host)}",
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
        if network.loses and not netem:
            in_namespace(self.switch_namespace, lambda: offloads_off(*(f"p{host}" for host in hosts)))
            for host in hosts:
                in_namespace(self.namespace(host), lambda: offloads_off("eth0"))
        for host in hosts:
            self._shape(self.namespace(host), "eth0", host, network.losses_out[host] if netem else 0.0, netem)
            self._shape(self.switch_namespace, f"p{host}", host, network.losses[host], netem)
            if network.losses_out[host] and not netem and not user_space:
                # Where packets come in: a sender's own device must not drop, since TCP sees that and waits.
                self._drop(f"p{host}", "ingress", network.losses_out[host])
        if user_space:
            self._start_switch()
        self._describe(netem, user_space)
        view = {
            "hosts": [{"namespace": self.namespace(host), "address": network.address(host)} for host in hosts],
            "network": {**network.to_dict(), "used": self.used},
            "lateness": str(self.lateness_path) if user_space else None,
        }
        (self.folder / "lab.json").write_text(json.dumps(view, indent=2) + "\n", encoding="utf-8")

    def _shape(self, namespace: str, device: str, host: int, loss: float, netem: bool) -> None:
        """Rate, and loss or what netem does, of one direction of one link."""
        network, rate = self.network, self.network.rates[host]
        parent = ["root", "handle", "1:"]
        lines = []
        if rate is not None:
            # tbf cuts packets that are longer than its burst, which costs more time than there is.
            senders = [host] if device == "eth0" else range(network.num_hosts)
            longest = max(network.longest_bytes(sender) for sender in senders)
            burst = max(longest, round(rate * _BURST_S)) + 2 * network.mtu
            words = f"rate {round(rate * 8)}bit burst {burst} limit {_QUEUE_BYTES}"
            lines.append(f"qdisc add dev {device} {' '.join(parent)} tbf {words}")
            parent = ["parent", "1:1", "handle", "10:"]
        if netem:
            # Half of the delay on each of the two devices that a packet leaves.
            words = f"delay {network.delay_s / 2 * 1e6:.0f}us loss {loss * 100:.6f}% limit 100000"
            lines.append(f"qdisc add dev {device} {' '.join(parent)} netem {words}")
        if lines:
            run_tool(["tc", "-n", namespace, "-batch", "-"], "\n".join(lines) + "\n")
        if loss and not netem:
            self._drop(device, "egress", loss)

    def _drop(self, device: str, direction: str, loss: float) -> None:
        """Lose a share of the packets that pass a port of the switch."""
        words = ["tc", "-n", self.switch_namespace]
        with contextlib.suppress(RunError):  # it is there for the other direction
            run_tool([*words, "qdisc", "add", "dev", device, "clsact"])
        program = ["bpf", "direct-action", "bytecode", drop_filter(loss)]
        run_tool([*words, "filter", "add", "dev", device, direction, "protocol", "ip", *program])

    def _start_switch(self) -> None:
        network = self.network
        words = ["ip", "netns", "exec", self.switch_namespace, sys.executable, "-m", "stagewright.fabric.lab.switch"]
        words += [repr(network.delay_s), repr(self.tolerance_s), str(self.lateness_path)]
        words += [f"p{host}={network.losses_out[host]!r}" for host in range(network.num_hosts)]
        self._switch = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, encoding="utf-8"
        )
        assert self._switch.stdout is not None
        if self._switch.stdout.readline().strip() != "ready":
            _, complaint = self._switch.communicate(timeout=5.0)
            raise RunError(f"the user-space switch did not start: {(complaint or '').strip().splitlines()[-1:]}")

    @property
    def tolerance_s(self) -> float:
        """A frame that leaves so much too late voids its trial."""
        return max(1e-3, 0.2 * self.network.delay_s)

    def _describe(self, netem: bool, user_space: bool) -> None:
        network = self.network
        self.used = [
            f"namespaces {self.tag}-0 … {network.num_hosts - 1}, " + ("packet sockets" if user_space else "bridge")
        ]
        if any(rate is not None for rate in network.rates):
            self.used.append("rate by tbf on both ends of each link")
        if network.delay_s:
            how = (
                "netem"
                if netem
                else "a user-space switch (this kernel has no netem), which voids trials when it is late"
            )
            self.used.append(f"delay by {how}")
        if network.loses:
            self.used.append("loss by " + ("netem" if netem else "random drops (BPF in tc), offloads off"))
        timeout = "" if network.rto_min_s is None else f", rto_min {network.rto_min_s * 1e3:g} ms"
        self.used.append(f"congestion control {network.congestion}{timeout} pinned on every route")

    def lateness(self) -> tuple[int, float]:
        """How many frames left late, and by how much at worst."""
        if not self.lateness_path.exists():
            return 0, 0.0
        noted = np.fromfile(self.lateness_path, dtype="<f8").reshape(-1, 2)
        return len(noted), float(noted[:, 1].max()) if len(noted) else 0.0


@contextlib.contextmanager
def make_lab(network: LabNetwork) -> Iterator[Lab]:
    """A lab for the time of a block; also removed where the process is told to end."""
    need_root()
    check_congestion(network.congestion)
    remove_ownerless()

    def end(number: int, frame: object) -> None:
        raise RunError(f"the lab was ended by {signal.Signals(number).name}")

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with Lab(network) as lab:
            yield lab
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_in_lab(
    network: LabNetwork, command: Sequence[str], *, each: bool = False, tell: Callable[[str], None] = lambda line: None
) -> int:
    """Make a lab, run a command in it, remove it; returns the command's exit code, the first one that is not 0."""
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no command {command[0]!r} to run in the lab")
    with make_lab(network) as lab:
        tell(f"lab: {network.describe()}")
        for line in lab.used:
            tell(f"lab: {line}")
        environment = {**os.environ, ENVIRONMENT: str(lab.folder / "lab.json")}
        processes = []
        try:
            if each:
                for host in range(network.num_hosts):
                    own = {
                        "RANK": str(host),
                        "LOCAL_RANK": "0",
                        "WORLD_SIZE": str(network.num_hosts),
                        "MASTER_ADDR": network.address(0),
                        "MASTER_PORT": str(_MASTER_PORT),
                        "GLOO_SOCKET_IFNAME": "eth0",
                        "NCCL_SOCKET_IFNAME": "eth0",
                    }
                    words = ["ip", "netns", "exec", lab.namespace(host), *command]
                    processes.append(_start(words, {**environment, **own}))
            else:
                processes.append(_start(command, environment))
            code = _wait(processes)
        except KeyboardInterrupt:
            # The terminal told the command too: it may still save what it has.
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
            tell(f"lab: the switch was late with {count} frames, by {worst_s * 1e3:.3g} ms at worst")
        return code


def _start(words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(list(words), env=dict(environment), preexec_fn=die_with_parent)


def _wait(processes: list[subprocess.Popen[bytes]], until_s: float = math.inf) -> int:
    """Until all have ended, or one has failed, or it is time."""
    while time.monotonic() < until_s:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.02)
    return 1


def remove_ownerless() -> list[str]:
    """Remove the labs whose owner is no longer there; returns their names."""
    found = set()
    for place in (_NETNS, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            for entry in place.iterdir():
                match = _NAME.fullmatch(entry.name)
                if match and _started(int(match[1])) != match[2]:
                    found.add(f"sw-lab-{match[1]}-{match[2]}")
    for tag in found:
        _remove(tag)
    return sorted(found)


def _remove(tag: str) -> None:
    names = []
    with contextlib.suppress(OSError):
        names = [entry.name for entry in _NETNS.iterdir() if entry.name.startswith(f"{tag}-")]
    for name in names:
        done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, encoding="utf-8", check=False)
        for number in done.stdout.split():
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(number), signal.SIGKILL)
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    shutil.rmtree(Path(tempfile.gettempdir()) / tag, ignore_errors=True)


def _started(pid: int) -> str:
    """When a process began, in ticks after boot; empty where there is none of that number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]
