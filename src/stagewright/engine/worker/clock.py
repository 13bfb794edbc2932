"""Offsets of the workers' clocks to worker 0's: they put events of many machines on one timeline.

    worker r   sends at a ──────────────►  worker 0 answers with its time t
               hears at b ◄──────────────
    offset = t − (a + b) / 2, error at most (b − a) / 2; the quickest of several round trips counts

Workers of one machine read the same clock, so their offset and error are 0 and nothing is sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist

from stagewright.engine.worker.broadcast import gather_text
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity
from stagewright.files.atomic import save_text
from stagewright.runs.worker_folder import WorkerFolder

_ROUND_TRIPS = 12


def write_clock(context: WorkerContext, folder: WorkerFolder) -> None:
    """Measure this worker's clock offset and write clock.json; every worker must call this."""
    activity.begin("wait for clocks")
    offset_s, error_s = exchange(context.rank, context.mesh.num_workers)
    content = {
        "host": socket.gethostname(),
        "offset_s": offset_s,
        "error_s": error_s,
        "wall_s": time.time() - time.perf_counter(),
    }
    folder.path.mkdir(parents=True, exist_ok=True)
    save_text(json.dumps(content, indent=2) + "\n", folder.path / "clock.json")


def exchange(rank: int, num_workers: int, identity: str | None = None) -> tuple[float, float]:
    """Return the offset to add to this worker's clock, and its error; every worker must call this."""
    if num_workers == 1:
        return 0.0, 0.0
    identities = gather_text(identity or clock_identity(), torch.device("cpu"))
    result = (0.0, 0.0)
    for peer in range(1, num_workers):
        if identities[0] == identities[peer]:
            continue
        if rank == 0:
            _answer(peer)
        elif rank == peer:
            result = best_offset(_ask())
    return result


def best_offset(round_trips: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Return offset and error of the quickest round trip (sent, answered, received)."""
    sent, answered, received = min(round_trips, key=lambda trip: trip[2] - trip[0])
    return answered - (sent + received) / 2, (received - sent) / 2


def clock_identity() -> str:
    """Return a text that is equal for processes with the same clock: same boot, same time namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/time"))
    return " ".join(parts if len(parts) == 1 else parts[1:])


def _ask() -> list[tuple[float, float, float]]:
    moment = torch.zeros(1, dtype=torch.float64)
    round_trips = []
    for _ in range(_ROUND_TRIPS):
        sent = time.perf_counter()
        dist.send(moment, dst=0)
        dist.recv(moment, src=0)
        round_trips.append((sent, float(moment), time.perf_counter()))
    return round_trips


def _answer(rank: int) -> None:
    moment = torch.zeros(1, dtype=torch.float64)
    for _ in range(_ROUND_TRIPS):
        dist.recv(moment, src=rank)
        moment[0] = time.perf_counter()
        dist.send(moment, dst=rank)
