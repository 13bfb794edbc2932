"""The clocks of workers, brought together with worker 0's: what makes one timeline of many machines.

    worker r   sends at a ──────────────►  worker 0 answers with its time t
               hears at b ◄──────────────
    offset = t − (a + b) / 2, off by at most (b − a) / 2: of some round trips the quickest counts

Workers of one machine read the same clock, so there offset and error are 0 and nothing is sent.
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

from stagewright.engine.worker.context import WorkerContext
from stagewright.files.atomic import save_text
from stagewright.runs.worker_folder import WorkerFolder

__all__ = ["best_offset", "clock_identity", "exchange", "write_clock"]

_ROUND_TRIPS = 12
_IDENTITY_BYTES = 256


def write_clock(context: WorkerContext, folder: WorkerFolder) -> None:
    """Find out how this worker's clock is to be read and write it down; every worker must call this."""
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
    """What must be added to this worker's clock, and how far that may be off; every worker must call this."""
    if num_workers == 1:
        return 0.0, 0.0
    own = _as_tensor(identity or clock_identity())
    every = [torch.empty_like(own) for _ in range(num_workers)]
    dist.all_gather(every, own)
    result = (0.0, 0.0)
    for other in range(1, num_workers):
        if torch.equal(every[0], every[other]):
            continue
        if rank == 0:
            _answer(other)
        elif rank == other:
            result = best_offset(_ask())
    return result


def best_offset(round_trips: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Offset and error of the quickest of some (sent, answered, heard)."""
    sent, answered, heard = min(round_trips, key=lambda trip: trip[2] - trip[0])
    return answered - (sent + heard) / 2, (heard - sent) / 2


def clock_identity() -> str:
    """The same text for processes that read the same clock: one boot of one kernel, one time namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/time"))
    return " ".join(parts if len(parts) == 1 else parts[1:])


def _ask() -> list[tuple[float, float, float]]:
    moment = torch.zeros(1, dtype=torch.float64)
    found = []
    for _ in range(_ROUND_TRIPS):
        sent = time.perf_counter()
        dist.send(moment, dst=0)
        dist.recv(moment, src=0)
        found.append((sent, float(moment), time.perf_counter()))
    return found


def _answer(rank: int) -> None:
    moment = torch.zeros(1, dtype=torch.float64)
    for _ in range(_ROUND_TRIPS):
        dist.recv(moment, src=rank)
        moment[0] = time.perf_counter()
        dist.send(moment, dst=rank)


def _as_tensor(text: str) -> torch.Tensor:
    content = text.encode()[:_IDENTITY_BYTES].ljust(_IDENTITY_BYTES, b"\0")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
