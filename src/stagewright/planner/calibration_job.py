"""What each of two workers does to find the engine's terms: the same processes, groups and pinning as a run.

    messages     there and back, by size                       ─► the link
    sums         all-reduce, by size                           ─► what a step of a collective gets
    crowding     a piece of work alone, then on both at once   ─► how much longer it takes
    sharing      the same work while sums or messages pass     ─► device time of a collective, of a message's byte

All of it in several rounds, so that what else runs for a moment spoils no figure alone.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from stagewright.cluster.atomic_file import save_text
from stagewright.engine.context import WorkerContext
from stagewright.plan.value import Plan
from stagewright.store.run import RunFolder

__all__ = ["run"]

MESSAGE_BYTES = (8, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
SUM_BYTES = (8, 64 << 10, 256 << 10, 1 << 20, 8 << 20)
_ROUNDS = 7
_TRIPS = 6


def run(plan: Plan, context: WorkerContext, run_folder: RunFolder) -> None:
    """Measure; worker 0 writes what was found."""
    probe = _Probe(context)
    rounds = [probe.round() for _ in range(_ROUNDS + 1)][1:]
    if context.rank == 0:
        found = {
            "messages": _medians([one["messages"] for one in rounds]),
            "sums": _medians([one["sums"] for one in rounds]),
            **{
                name: statistics.median(one[name] for one in rounds)
                for name in ("alone_s", "together_s", "with_sums_s", "sums_busy_s", "with_messages_s")
            },
            "message_bytes": MESSAGE_BYTES[-1] * 2 * _TRIPS,
        }
        save_text(json.dumps(found) + "\n", run_folder.path / "calibration.json")


def _medians(rounds: list[dict[int, float]]) -> dict[int, float]:
    return {size: statistics.median(one[size] for one in rounds) for size in rounds[0]}


class _Probe:
    """One worker's part."""

    def __init__(self, context: WorkerContext) -> None:
        place = context.torch_device
        self.rank, self.place = context.rank, place
        self.group = context.data_group
        self.peer = 1 - context.rank
        generator = torch.Generator().manual_seed(0)
        rows, wide = (128, 512) if place.type == "cpu" else (4096, 4096)
        self.values = torch.randn(rows, wide, generator=generator).to(place)
        # More than a core's own caches hold, as a model's weights are.
        self.weights = [torch.randn(wide, wide, generator=generator).to(place) for _ in range(48)]
        self.buffers = {size: torch.zeros(max(1, size // 4), device=place) for size in (*MESSAGE_BYTES, *SUM_BYTES)}

    def round(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "messages": {size: self._message(size) for size in MESSAGE_BYTES},
            "sums": {size: self._sum(size) for size in SUM_BYTES},
        }
        self._together()
        alone = [0.0, 0.0]
        for turn in range(2):
            if turn == self.rank:
                alone[turn] = self._timed(self._work)
            self._together()
        found["alone_s"] = alone[self.rank]
        self._together()
        found["together_s"] = self._timed(self._work)
        self._together()
        largest = SUM_BYTES[-1]
        busy = 0.0
        pending: list[Any] = []

        def with_sums() -> None:
            for _ in range(_TRIPS):
                pending.append(dist.all_reduce(self.buffers[largest], group=self.group, async_op=True))
            self._work()
            for work in pending:
                work.wait()
            pending.clear()

        found["with_sums_s"] = self._timed(with_sums)
        busy = self._sum(largest) * _TRIPS
        found["sums_busy_s"] = busy
        self._together()

        def with_messages() -> None:
            buffer, arriving = self.buffers[MESSAGE_BYTES[-1]], torch.empty_like(self.buffers[MESSAGE_BYTES[-1]])
            works: list[Any] = []
            for _ in range(_TRIPS):
                works.append(dist.isend(buffer, self.peer))
                works.append(dist.irecv(arriving, self.peer))
            self._work()
            for work in works:
                work.wait()

        found["with_messages_s"] = self._timed(with_messages)
        self._together()
        return found

    def _work(self) -> None:
        """Some tens of milliseconds of what models do: products, and passes over memory."""
        value = self.values
        for weights in self.weights:
            value = torch.nn.functional.gelu(value @ weights)
            value = torch.nn.functional.layer_norm(value, value.shape[-1:])

    def _message(self, size: int) -> float:
        buffer = self.buffers[size]
        self._together()

        def trip() -> None:
            for _ in range(_TRIPS):
                if self.rank == 0:
                    dist.send(buffer, self.peer)
                    dist.recv(buffer, self.peer)
                else:
                    dist.recv(buffer, self.peer)
                    dist.send(buffer, self.peer)

        return self._timed(trip) / (2 * _TRIPS)

    def _sum(self, size: int) -> float:
        buffer = self.buffers[size]
        self._together()
        return self._timed(lambda: [dist.all_reduce(buffer, group=self.group) for _ in range(_TRIPS)]) / _TRIPS

    def _timed(self, call: Callable[[], object]) -> float:
        self._settled()
        start = time.perf_counter()
        call()
        self._settled()
        return time.perf_counter() - start

    def _settled(self) -> None:
        if self.place.type == "cuda":
            torch.cuda.synchronize(self.place)

    def _together(self) -> None:
        self._settled()
        dist.barrier()
