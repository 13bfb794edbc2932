"""Measure the link between two devices of this machine with two pinned processes.

The processes (`link_worker`) find each other through a file and communicate through Gloo over the loopback interface,
as CPU workers of a run do; two GPUs communicate through NCCL, two shares of one GPU through its memory. Both processes
have ended when this returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stagewright.cluster.cluster import Cluster, DeviceGroup, Links
from stagewright.cluster.device import Device, check_devices
from stagewright.errors import RunError
from stagewright.machine.link_fit import LinkPoint, MeasuredLink, fit_collective, fit_link
from stagewright.machine.machine import Machine
from stagewright.shared_memory.process_group import GPU_BACKEND

_MIB = 2**20


def measure_link(devices: Sequence[str], *, budget_s: float = 3.0, limit_s: float = 120.0) -> MeasuredLink:
    """Time messages between two devices such as cpu:0 and cpu:1.

    Measuring takes about `budget_s`, starting the processes some seconds more; after `limit_s` they are ended.
    """
    assert len(devices) == 2, "a link has two ends"
    backend = _backend(devices)
    with tempfile.TemporaryDirectory(prefix="stagewright-link-") as folder:
        ends: list[subprocess.Popen[str]] = []
        logs = [Path(folder) / f"end-{rank}.log" for rank in range(2)]
        try:
            for rank, device in enumerate(devices):
                words = [sys.executable, "-m", "stagewright.machine.link_worker", str(rank), device, backend]
                with open(logs[rank], "w", encoding="utf-8") as log:
                    ends.append(
                        subprocess.Popen(
                            [*words, str(Path(folder) / "meet"), str(budget_s)],
                            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                            stderr=log,
                            text=True,
                            env=_environment(),
                        )
                    )
            output = _wait(ends, logs, limit_s)
        finally:
            for end in ends:
                with contextlib.suppress(OSError):
                    end.kill()
                end.wait()
                if end.stdout is not None:
                    end.stdout.close()
    answer = json.loads(output.splitlines()[-1])
    pinned = answer["pinned"] and devices[0] != devices[1]
    measured = fit_link([LinkPoint(**point) for point in answer["points"]], pinned=pinned, backend=backend)
    return replace(measured, collective=fit_collective([LinkPoint(**point) for point in answer["sums"]]))


def _backend(devices: Sequence[str]) -> str:
    if not all(device.startswith("cuda") for device in devices):
        return "gloo"
    if any(Device.parse(device).share > 1 for device in devices):
        check_devices(devices)
        return GPU_BACKEND
    return "nccl"


def _environment() -> dict[str, str]:
    """Return this environment with Gloo on the loopback interface."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    loopback = {"GLOO_SOCKET_IFNAME": names[0]} if names else {}
    return {**os.environ, **loopback, "PYTHONWARNINGS": "ignore"}


def _wait(ends: Sequence[subprocess.Popen[str]], logs: Sequence[Path], limit_s: float) -> str:
    """Return the output of the first end once both have ended without error."""
    until = time.monotonic() + limit_s
    while any(end.poll() is None for end in ends):
        failed = [rank for rank, end in enumerate(ends) if end.poll() not in (None, 0)]
        if failed or time.monotonic() > until:
            break
        time.sleep(0.02)
    for rank, end in enumerate(ends):
        code = end.poll()
        if code != 0 and (code is not None or all(peer.poll() in (None, 0) for peer in ends)):
            last = (logs[rank].read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no message"])[-1]
            how = f"ended with code {code}" if code is not None else f"had not ended after {limit_s:g} s"
            raise RunError(f"the link could not be measured: end {rank} {how}: {last}")
    stream = ends[0].stdout
    assert stream is not None
    return stream.read()


def cluster_of(machine: Machine, measured: MeasuredLink | None = None) -> Cluster:
    """Describe this machine as a cluster: its GPUs, or a CPU device for each core.

    CPU devices share the memory evenly.
    """
    links = Links(intra_host=measured.link, collective=measured.collective) if measured else Links()
    if machine.gpus:
        alike: dict[tuple[str, int], int] = {}
        for gpu in machine.gpus:
            key = (gpu.name, gpu.memory_bytes // _MIB * _MIB)
            alike[key] = alike.get(key, 0) + 1
        groups = tuple(
            DeviceGroup(kind="cuda", count=count, memory_bytes=memory_bytes, hardware=name)
            for (name, memory_bytes), count in alike.items()
        )
        return Cluster(devices=groups, links=links)
    count = len(machine.separate_cores)
    if machine.core_quota is not None:
        count = max(1, min(count, int(machine.core_quota)))
    share = None if machine.memory_bytes is None else max(1, machine.memory_bytes // count // _MIB) * _MIB
    group = DeviceGroup(kind="cpu", count=count, memory_bytes=share, hardware=machine.processor)
    return Cluster(devices=(group,), links=links)
