"""Memory of every worker over one step, by what it is for, and why it was most when it was.

workers/N/memory.parquet: a row where an action begins, and one where most was held inside it
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stagewright.errors import UsageError
from stagewright.quantity import format_bytes, format_s
from stagewright.runs.run_folder import RunFolder
from stagewright.trace.read import read_clock

__all__ = ["CATEGORIES", "MemoryMoment", "WorkerMemory", "peak_sentence", "read_memory"]

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMoment:
    """What a worker held at one moment, in bytes."""

    time_s: float
    """Seconds since the first worker began the step."""
    parameters: int
    gradients: int
    optimizer: int
    """The optimiser's states."""
    activations: int
    """Kept for backward."""
    buffers: int
    other: int
    doing: str
    """What it was doing: "forward stage 0 micro-batch 3"."""

    @property
    def total_bytes(self) -> int:
        """All together."""
        return sum(getattr(self, name) for name in CATEGORIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """One worker's memory over a step."""

    rank: int
    """Its world rank."""
    moments: tuple[MemoryMoment, ...]
    """In the order of time."""

    @property
    def peak(self) -> MemoryMoment:
        """When most was held."""
        return max(self.moments, key=lambda one: one.total_bytes)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "worker": self.rank,
            "peak_bytes": self.peak.total_bytes,
            "peak": asdict(self.peak),
            "why": peak_sentence(self),
            "moments": [asdict(one) for one in self.moments],
        }


def read_memory(folder: RunFolder) -> tuple[WorkerMemory, ...]:
    """The memory of every worker; one error where it was not written down."""
    found = []
    for rank in range(folder.plan().mesh.num_workers):
        worker = folder.worker(rank)
        rows = worker.memory()
        if not rows:
            raise UsageError(
                f"{folder.path} has no memory of worker {rank} over time: it was made by an older version, its worker "
                "did not end, or it was trained for less than two steps; run its plan again"
            )
        found.append((rank, read_clock(worker).offset_s, rows))
    begin_s = min(row["time_s"] + offset_s for _, offset_s, rows in found for row in rows)
    return tuple(
        WorkerMemory(
            rank=rank,
            moments=tuple(
                MemoryMoment(**{**row, "time_s": row["time_s"] + offset_s - begin_s})
                for row in sorted(rows, key=lambda row: float(row["time_s"]))
            ),
        )
        for rank, offset_s, rows in found
    )


def peak_sentence(memory: WorkerMemory) -> str:
    """When a worker's memory was most, what it was, and why then."""
    peak = memory.peak
    sizes = sorted(((name, getattr(peak, name)) for name in CATEGORIES), key=lambda one: -one[1])
    parts = ", ".join(f"{_WORDS[name]} {format_bytes(size)}" for name, size in sizes if size)
    return (
        f"worker {memory.rank} held most, {format_bytes(peak.total_bytes)}, {format_s(peak.time_s)} into the step, in "
        f"{peak.doing}: {parts}; {_why(memory, sizes[0][0])}"
    )


_WORDS = {name: "optimiser states" if name == "optimizer" else name for name in CATEGORIES}


def _why(memory: WorkerMemory, largest: str) -> str:
    peak = memory.peak
    if peak.activations == 0:
        return "nothing is kept for backward then, so that is what it always holds"
    waiting = _held_microbatches(memory)
    if waiting > 1 and not peak.doing.startswith("backward"):
        return (
            f"{waiting} micro-batches are between their forward and their backward then, so their activations "
            "are kept at once"
        )
    last = "at the end of forward everything that backward needs is kept"
    if peak.doing.startswith("backward"):
        last = "gradients appear before the activations that made them go"
        if any(one.doing == peak.doing and one.activations < peak.activations for one in memory.moments):
            last = "forward runs again inside backward, so all that the stage keeps of a micro-batch is there at once"
    return last if largest == "activations" else f"{last}, beside the {_WORDS[largest]}"


def _held_microbatches(memory: WorkerMemory) -> int:
    """Micro-batches whose forward has begun and whose backward has not ended at the peak."""
    forward: set[tuple[str, ...]] = set()
    ended: set[tuple[str, ...]] = set()
    peak, running = memory.peak, ""
    for one in memory.moments:
        if one.doing != running:
            if running.startswith("backward"):
                ended.add(tuple(running.split()[-4:]))
            running = one.doing
        if running.startswith("forward"):
            forward.add(tuple(running.split()[-4:]))
        if one is peak:
            break
    return len(forward - ended)
