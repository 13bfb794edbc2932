"""Memory of every worker over one step by category, and an explanation of its peak.

workers/N/memory.parquet: a row where an action begins, and one for the peak inside it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from stagewright.errors import UsageError
from stagewright.files.json_values import from_json
from stagewright.quantity import format_bytes, format_s
from stagewright.runs.run_folder import RunFolder
from stagewright.runs.worker_folder import WorkerFolder
from stagewright.trace.read import MAX_TIME_S, read_clock

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMoment:
    """Memory of a worker at one moment, in bytes."""

    time_s: float
    """Seconds since the first worker began the step."""
    parameters: int
    gradients: int
    optimizer: int
    """Optimizer states."""
    activations: int
    """Saved for backward."""
    buffers: int
    other: int
    doing: str
    """Current action: "forward stage 0 micro-batch 3"."""

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, name) for name in CATEGORIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """One worker's memory over a step."""

    rank: int
    moments: tuple[MemoryMoment, ...]

    @property
    def peak(self) -> MemoryMoment:
        """The moment of the peak."""
        return max(self.moments, key=lambda moment: moment.total_bytes)

    def to_dict(self) -> dict[str, Any]:
        return {
            "worker": self.rank,
            "peak_bytes": self.peak.total_bytes,
            "peak": asdict(self.peak),
            "why": peak_sentence(self),
            "moments": [asdict(moment) for moment in self.moments],
        }


def read_memory(folder: RunFolder) -> tuple[WorkerMemory, ...]:
    """Read the memory of every worker; UsageError where it was not recorded."""
    workers = []
    for rank in range(folder.plan().mesh.num_workers):
        worker = folder.worker(rank)
        rows = worker.memory()
        if not rows:
            raise UsageError(
                f"{folder.path} has no memory of worker {rank} over time: the run is of an older version, the worker "
                "did not end, or it trained for less than two steps; run its plan again"
            )
        workers.append((rank, read_clock(worker).offset_s, [_moment(row, worker) for row in rows]))
    begin_s = min(moment.time_s + offset_s for _, offset_s, moments in workers for moment in moments)
    return tuple(
        WorkerMemory(
            rank=rank,
            moments=tuple(
                replace(moment, time_s=moment.time_s + offset_s - begin_s)
                for moment in sorted(moments, key=lambda moment: moment.time_s)
            ),
        )
        for rank, offset_s, moments in workers
    )


def _moment(row: Mapping[str, Any], worker: WorkerFolder) -> MemoryMoment:
    try:
        moment = from_json(MemoryMoment, row)
    except ValueError as error:
        raise UsageError(f"the memory of {worker.path} is damaged: {error}") from None
    if not abs(moment.time_s) < MAX_TIME_S or any(getattr(moment, name) < 0 for name in CATEGORIES):
        raise UsageError(f"the memory of {worker.path} is damaged: {moment}")
    return moment


def peak_sentence(memory: WorkerMemory) -> str:
    """Explain the peak of a worker's memory in one sentence."""
    peak = memory.peak
    sizes = sorted(((name, getattr(peak, name)) for name in CATEGORIES), key=lambda item: -item[1])
    parts = ", ".join(f"{_WORDS[name]} {format_bytes(size)}" for name, size in sizes if size)
    return (
        f"worker {memory.rank} peaks at {format_bytes(peak.total_bytes)}, {format_s(peak.time_s)} into the step, in "
        f"{peak.doing}: {parts}; {_why(memory, sizes[0][0])}"
    )


_WORDS = {name: "optimizer states" if name == "optimizer" else name for name in CATEGORIES}


def _why(memory: WorkerMemory, largest: str) -> str:
    peak = memory.peak
    if peak.activations == 0:
        return "nothing is saved for backward then, so this is its constant memory"
    waiting = _live_microbatches(memory)
    if waiting > 1 and not peak.doing.startswith("backward"):
        return (
            f"{waiting} micro-batches are between forward and backward then, so the activations of all of them "
            "are saved"
        )
    last = "at the end of forward everything that backward needs is saved"
    if peak.doing.startswith("backward"):
        last = "gradients are created before the activations that produced them are freed"
        if any(moment.doing == peak.doing and moment.activations < peak.activations for moment in memory.moments):
            last = "recomputation inside backward saves all activations of the stage for one micro-batch"
    return last if largest == "activations" else f"{last}, in addition to the {_WORDS[largest]}"


def _live_microbatches(memory: WorkerMemory) -> int:
    """Count the micro-batches between the start of forward and the end of backward at the peak."""
    forward: set[tuple[str, ...]] = set()
    ended: set[tuple[str, ...]] = set()
    peak, running = memory.peak, ""
    for moment in memory.moments:
        if moment.doing != running:
            if running.startswith("backward"):
                ended.add(tuple(running.split()[-4:]))
            running = moment.doing
        if running.startswith("forward"):
            forward.add(tuple(running.split()[-4:]))
        if moment is peak:
            break
    return len(forward - ended)
