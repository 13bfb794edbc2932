"""What each of two workers does to find the engine's terms: the same processes, groups and pinning as a run.

    messages     there and back, by size                       ─► the link
    sums         all-reduce, by size, each after some work     ─► what a step of a collective gets
    crowding     a piece of work alone, then on both at once   ─► how much longer it takes, which device is slower
    sharing      work while sums or messages pass              ─► what they take of the device, and their pace meanwhile

All of it in many short rounds, so that what else runs for a moment spoils no figure alone. Both workers' times are
kept: who comes last to a sum has not waited, and who works longest is waited for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from stagewright.engine.worker.context import WorkerContext
from stagewright.files.atomic import save_text
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan

__all__ = ["Probe", "both", "run"]

MESSAGE_BYTES = (8, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
SUM_BYTES = (8, *(64 << 10 << power for power in range(9)))  # 64 KiB … 16 MiB
_ROUNDS = 12
_TRIPS = 3
_BESIDE_BYTES = 8 << 20  # of each sum that runs beside work: a bucket of gradients
_BESIDE = 6  # more than a core's own caches hold, as gradients are; as long as half of the work, so that it shows


def run(plan: Plan, context: WorkerContext, run_folder: RunFolder) -> None:
    """Measure; worker 0 writes what both found, a list of rounds for each."""
    probe = Probe(context)
    found = both([probe.round() for _ in range(_ROUNDS + 1)][1:])
    if context.rank == 0:
        save_text(json.dumps(found) + "\n", run_folder.path / "calibration.json")


def both(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """What both workers found, on each of them, as it is read from JSON."""
    workers = [json.loads(text) for text in _texts_of_all(json.dumps(rounds))]
    return {"workers": workers, "message_bytes": MESSAGE_BYTES[-1] * 2 * _TRIPS, "num_trips": _TRIPS}


def _texts_of_all(text: str) -> list[str]:
    """Every worker's text, as plain bytes: nothing that comes from the network is unpickled."""
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(own)]))
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    padded[: len(own)] = own
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded)
    return [bytes(one[: int(size)].tolist()).decode() for one, size in zip(found, sizes, strict=True)]


class Probe:
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
        self.beside = [torch.zeros(_BESIDE_BYTES // 4, device=place) for _ in range(_BESIDE)]

    def round(self) -> dict[str, Any]:
        """The times of everything, once or a few times."""
        found: dict[str, Any] = {
            "messages": {size: self._message(size) for size in MESSAGE_BYTES},
            "sums": {size: self._sums(size) for size in SUM_BYTES},
        }
        for turn in range(2):
            self._together()
            if turn == self.rank:
                found["alone_s"] = self._timed(self._work)
        self._together()
        found["together_s"] = self._timed(self._work)
        self._together()
        found["beside_s"] = self._timed(lambda: [dist.all_reduce(one, group=self.group) for one in self.beside])
        self._together()
        found["with_sums_s"], found["sums_done_s"] = self._with_sums()
        self._together()
        found["with_messages_s"] = self._timed(self._with_messages)
        self._together()
        return found

    def _with_sums(self) -> tuple[float, float]:
        """Work twice while sums run: when the work was done, and when the last sum was."""
        done: list[float] = []
        self._settled()
        start = time.perf_counter()
        pending = [dist.all_reduce(one, group=self.group, async_op=True) for one in self.beside]
        told = [one.get_future().then(lambda _: done.append(time.perf_counter() - start)) for one in pending]
        self._work()
        self._work()
        if self.place.type == "cuda":
            torch.cuda.current_stream(self.place).synchronize()
        worked = time.perf_counter() - start
        for one in told:
            one.wait()
        self._settled()
        on_cuda = self.place.type == "cuda"  # there futures are done when their work is queued
        return worked, time.perf_counter() - start if on_cuda else max(done)

    def _with_messages(self) -> None:
        buffer, arriving = self.buffers[MESSAGE_BYTES[-1]], torch.empty_like(self.buffers[MESSAGE_BYTES[-1]])
        works: list[Any] = []
        for _ in range(_TRIPS):
            works.append(dist.isend(buffer, self.peer))
            works.append(dist.irecv(arriving, self.peer))
        self._work()
        for work in works:
            work.wait()

    def _work(self, num_layers: int | None = None) -> None:
        """Some tens of milliseconds of what models do: products, and passes over memory."""
        value = self.values
        for weights in self.weights[:num_layers]:
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

    def _sums(self, size: int) -> list[float]:
        """Sums as layers that are shared have them: each after a piece of work, which takes one worker longer."""
        buffer = self.buffers[size]
        self._together()
        taken = []
        for _ in range(_TRIPS):
            self._work(4)
            taken.append(self._timed(lambda: dist.all_reduce(buffer, group=self.group)))
        return taken

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
