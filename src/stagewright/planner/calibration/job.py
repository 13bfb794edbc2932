"""The calibration job of each of two workers, with the same processes, groups and pinning as a run.

    P2P          round trips by size                           ─► the link
    all-reduce   by size, each after some compute; also as     ─► latency and bandwidth of collectives
                 in tensor groups, by shared memory
    contention   compute on one device, then on both at once   ─► slowdown, which device is slower
    overlap      compute during all-reduces or P2P             ─► compute lost to them, and their speed meanwhile
    FSDP         steps of sharded units, on CPU cores          ─► its copies and hooks, apart from its collectives

Measurements run in many short rounds, so that a brief disturbance affects no single value alone. The times of both
workers are kept: the last one to join an all-reduce has not waited, and the slowest one determines a step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from stagewright.cluster.device import Device
from stagewright.engine.worker.context import WorkerContext, backend_in_memory, gather_memory_ids
from stagewright.files.atomic import save_text
from stagewright.planner.calibration.fsdp_probe import FSDPProbe
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan

P2P_BYTES = (8, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
ALLREDUCE_BYTES = (8, *(64 << 10 << power for power in range(9)))  # 64 KiB … 16 MiB
_ROUNDS = 12
_ROUND_TRIPS = 3
_OVERLAPPED_BYTES = 8 << 20  # of each overlapped all-reduce: a gradient bucket
_NUM_OVERLAPPED = 6  # more than a core's caches hold, like gradients; about half as long as the compute


def run(plan: Plan, context: WorkerContext, run_folder: RunFolder) -> None:
    """Measure; worker 0 writes the rounds of both workers."""
    probe = Probe(context)
    measured = gather_rounds([probe.round() for _ in range(_ROUNDS + 1)][1:])
    if context.rank == 0:
        save_text(json.dumps(measured) + "\n", run_folder.path / "calibration.json")


def gather_rounds(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Gather both workers' rounds on each of them."""
    workers = [json.loads(text) for text in _all_gather_text(json.dumps(rounds))]
    return {"workers": workers, "message_bytes": P2P_BYTES[-1] * 2 * _ROUND_TRIPS, "num_trips": _ROUND_TRIPS}


def _all_gather_text(text: str) -> list[str]:
    """Gather every worker's text as bytes: nothing received from the network is unpickled."""
    encoded = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(encoded)]))
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    padded[: len(encoded)] = encoded
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded)
    return [bytes(text[: int(size)].tolist()).decode() for text, size in zip(texts, sizes, strict=True)]


def shape_of_compute(device: Device) -> tuple[int, int]:
    """Return the rows and the width of matrices that take a device some milliseconds each."""
    return (128, 512) if device.kind == "cpu" else (4096 // device.share, 4096)


class Probe:
    """The measurements of one worker."""

    def __init__(self, context: WorkerContext) -> None:
        device = context.torch_device
        self.rank, self.device = context.rank, device
        self.group = context.data_group
        backend = backend_in_memory(gather_memory_ids(context.device))
        # As in tensor parallelism, where that differs.
        self.tensor_group = None if backend is None else dist.new_group([0, 1], backend=backend)
        self.peer = 1 - context.rank
        generator = torch.Generator(device).manual_seed(0)
        rows, width = shape_of_compute(context.device)
        self.values = torch.randn(rows, width, generator=generator, device=device)
        # More than a core's caches hold, like a model's weights.
        self.weights = [torch.randn(width, width, generator=generator, device=device) for _ in range(48)]
        self.buffers = {size: torch.zeros(max(1, size // 4), device=device) for size in (*P2P_BYTES, *ALLREDUCE_BYTES)}
        self.fsdp = FSDPProbe(context) if device.type == "cpu" else None  # a GPU overlaps it with compute
        self.overlapped = [torch.zeros(_OVERLAPPED_BYTES // 4, device=device) for _ in range(_NUM_OVERLAPPED)]

    def round(self) -> dict[str, Any]:
        """Measure everything once."""
        times: dict[str, Any] = {
            "messages": {size: self._p2p_s(size) for size in P2P_BYTES},
            "sums": {size: self._allreduce_s(size, self.group) for size in ALLREDUCE_BYTES},
        }
        if self.tensor_group is not None:
            times["tensor_sums"] = {size: self._allreduce_s(size, self.tensor_group) for size in ALLREDUCE_BYTES}
        for turn in range(2):
            self._barrier()
            if turn == self.rank:
                times["alone_s"] = self._timed(self._compute)
        self._barrier()
        times["together_s"] = self._timed(self._compute)
        self._barrier()
        times["beside_s"] = self._timed(
            lambda: [dist.all_reduce(buffer, group=self.group) for buffer in self.overlapped]
        )
        self._barrier()
        times["with_sums_s"], times["sums_done_s"] = self._overlap_allreduce()
        self._barrier()
        times["with_messages_s"] = self._timed(self._overlap_p2p)
        times["fsdp"] = self.fsdp.round(self._timed, self._barrier) if self.fsdp is not None else {}
        self._barrier()
        return times

    def _overlap_allreduce(self) -> tuple[float, float]:
        """Compute twice during all-reduces; return when the compute and when the last all-reduce was done."""
        done: list[float] = []
        self._synchronize()
        start = time.perf_counter()
        pending = [dist.all_reduce(buffer, group=self.group, async_op=True) for buffer in self.overlapped]
        futures = [work.get_future().then(lambda _: done.append(time.perf_counter() - start)) for work in pending]
        self._compute()
        self._compute()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        compute_s = time.perf_counter() - start
        for future in futures:
            future.wait()
        self._synchronize()
        on_cuda = self.device.type == "cuda"  # there futures complete when their work is queued
        return compute_s, time.perf_counter() - start if on_cuda else max(done)

    def _overlap_p2p(self) -> None:
        buffer, received = self.buffers[P2P_BYTES[-1]], torch.empty_like(self.buffers[P2P_BYTES[-1]])
        works: list[Any] = []
        for _ in range(_ROUND_TRIPS):
            works.append(dist.isend(buffer, self.peer))
            works.append(dist.irecv(received, self.peer))
        self._compute()
        for work in works:
            work.wait()

    def _compute(self, num_layers: int | None = None) -> None:
        """Run some tens of milliseconds of typical model compute: matrix products and memory-bound operators."""
        value = self.values
        for weights in self.weights[:num_layers]:
            value = torch.nn.functional.gelu(value @ weights)
            value = torch.nn.functional.layer_norm(value, value.shape[-1:])

    def _p2p_s(self, size: int) -> float:
        buffer = self.buffers[size]
        self._barrier()

        def round_trips() -> None:
            for _ in range(_ROUND_TRIPS):
                if self.rank == 0:
                    dist.send(buffer, self.peer)
                    dist.recv(buffer, self.peer)
                else:
                    dist.recv(buffer, self.peer)
                    dist.send(buffer, self.peer)

        return self._timed(round_trips) / (2 * _ROUND_TRIPS)

    def _allreduce_s(self, size: int, group: Any) -> list[float]:
        """Measure all-reduces as in tensor parallel layers: each after compute, which takes one worker longer."""
        buffer = self.buffers[size]
        self._barrier()
        times = []
        for _ in range(_ROUND_TRIPS):
            self._compute(4)
            times.append(self._timed(lambda: dist.all_reduce(buffer, group=group)))
        return times

    def _timed(self, call: Callable[[], object]) -> float:
        self._synchronize()
        start = time.perf_counter()
        call()
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _barrier(self) -> None:
        self._synchronize()
        dist.barrier()
