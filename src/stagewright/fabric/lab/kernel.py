"""What this kernel can do for a lab, and the calls that iproute2 has no words for."""

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

__all__ = ["die_with_parent", "drop_filter", "has_netem", "in_namespace", "need_root", "offloads_off", "run_tool"]

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_SIOCETHTOOL = 0x8946
# ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO: whole packets of 64 KiB would be lost at once.
_OFFLOADS = (0x0000001F, 0x00000024, 0x0000002C)


def need_root() -> None:
    """Refuse early, with the way out."""
    if not hasattr(os, "geteuid") or os.uname().sysname != "Linux":
        raise UsageError("a lab needs Linux: it is made of network namespaces")
    if os.geteuid() != 0:
        raise UsageError("a lab needs root, to make network namespaces: put sudo before the command")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise UsageError(f"a lab needs {tool!r}, which is not here: install iproute2")


def run_tool(words: Sequence[str], batch: str | None = None) -> None:
    """Run ip or tc; what they complain of is the error."""
    done = subprocess.run([*words], input=batch, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise RunError(f"{' '.join(words[:6])} failed: {why}")


def in_namespace(name: str, work: Callable[[], None]) -> None:
    """Do something in a network namespace, in a thread that ends with it."""
    failure: list[BaseException] = []

    def inside() -> None:
        try:
            library = ctypes.CDLL(None, use_errno=True)
            with open(f"/run/netns/{name}") as handle:
                if library.setns(handle.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            work()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    if failure:
        raise RunError(f"in namespace {name}: {failure[0]}")


def offloads_off(*devices: str) -> None:
    """Packets as they are on a wire, in the current namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for device, command in product(devices, _OFFLOADS):
            value = bytearray(struct.pack("II", command, 0))
            address = (ctypes.c_char * len(value)).from_buffer(value)
            request = struct.pack("16sP", device.encode(), ctypes.addressof(address)).ljust(40, b"\0")
            fcntl.ioctl(asking.fileno(), _SIOCETHTOOL, request)


def drop_filter(share: float) -> str:
    """A classic BPF program for tc that drops that share of packets: load a random number, compare, decide."""
    threshold = min(0xFFFFFFFF, round(share * 2**32))
    random = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM
    return f"4,32 0 0 {random},53 0 1 {threshold},6 0 0 4294967295,6 0 0 2"


def has_netem(namespace: str) -> bool:
    """Whether the kernel has netem, tried on a namespace's loopback."""
    words = ["tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    done = subprocess.run(words, capture_output=True, check=False)
    if done.returncode == 0:
        run_tool(["tc", "-n", namespace, "qdisc", "del", "dev", "lo", "root"])
    return done.returncode == 0


def die_with_parent() -> None:
    """For a child: be killed when the parent is gone, however it went."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
