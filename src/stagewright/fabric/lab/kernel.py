"""Kernel features for the lab: checks, and system calls that iproute2 does not offer."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Sequence
from itertools import product

from stagewright.errors import RunError, UsageError

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_SIOCETHTOOL = 0x8946
# ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO: with offloads, a drop would lose 64 KiB at once.
_OFFLOADS = (0x0000001F, 0x00000024, 0x0000002C)


def check_root() -> None:
    """Raise UsageError early if the lab cannot run, with a fix."""
    if not hasattr(os, "geteuid") or os.uname().sysname != "Linux":
        raise UsageError("a lab needs Linux: it consists of network namespaces")
    if os.geteuid() != 0:
        raise UsageError("a lab needs root to create network namespaces: run the command with sudo")
    missing = _missing_capabilities()
    if missing:
        raise UsageError(
            f"a lab needs {' and '.join(missing)}, which this container's root lacks: start it with --privileged"
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise UsageError(f"a lab needs {tool!r}, which is not installed: install iproute2")


def _missing_capabilities(status: str = "/proc/self/status") -> list[str]:
    """Return the capabilities that a lab needs and this process lacks: a container's root often lacks both."""
    try:
        with open(status, encoding="ascii") as lines:
            effective = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), -1)
    except (OSError, ValueError, IndexError):
        return []  # unknown: creating the lab will tell
    needed = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
    return [name for name, bit in needed.items() if not effective >> bit & 1]


def run_tool(arguments: Sequence[str], batch: str | None = None) -> None:
    """Run ip or tc; raise RunError with its message if it fails."""
    result = subprocess.run([*arguments], input=batch, capture_output=True, encoding="utf-8", check=False)
    if result.returncode:
        why = (result.stderr.strip().splitlines() or ["no message"])[0]
        raise RunError(f"{' '.join(arguments[:6])} failed: {why}")


def in_namespace(name: str, function: Callable[[], None]) -> None:
    """Run a function in a network namespace, in a separate thread."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            library = ctypes.CDLL(None, use_errno=True)
            with open(f"/run/netns/{name}") as handle:
                if library.setns(handle.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            function()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise RunError(f"in namespace {name}: {failure[0]}")


def disable_offloads(*devices: str) -> None:
    """Disable offloads in the current namespace, so that packets have their size on the wire."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for device, command in product(devices, _OFFLOADS):
            value = bytearray(struct.pack("II", command, 0))
            address = (ctypes.c_char * len(value)).from_buffer(value)
            request = struct.pack("16sP", device.encode(), ctypes.addressof(address)).ljust(40, b"\0")
            fcntl.ioctl(query.fileno(), _SIOCETHTOOL, request)


def drop_filter(fraction: float) -> str:
    """Return a classic BPF program for tc that drops a fraction of packets: load a random number, compare, decide."""
    threshold = min(0xFFFFFFFF, round(fraction * 2**32))
    random = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM
    return f"4,32 0 0 {random},53 0 1 {threshold},6 0 0 4294967295,6 0 0 2"


def has_netem(namespace: str) -> bool:
    """Return whether the kernel has netem, tested on a namespace's loopback."""
    arguments = ["tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    result = subprocess.run(arguments, capture_output=True, check=False)
    if result.returncode == 0:
        run_tool(["tc", "-n", namespace, "qdisc", "del", "dev", "lo", "root"])
    return result.returncode == 0


def die_with_parent() -> None:
    """Have this process killed when its parent exits."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
