"""A forecast: the predicted step of a plan, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from stagewright.simulator.memory import WorkerMemory

__all__ = ["CollectiveUse", "Forecast", "LinkUse", "Segment", "Stream", "WorkerForecast"]

Stream: TypeAlias = Literal["compute", "tensor", "data", "send", "receive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Something that a worker does for a while."""

    worker: int
    """The worker's place along the pipeline; its peers along data and tensor do the same."""
    stream: Stream
    """Which of the worker's streams."""
    name: str
    """What: F, B, I, W, message, all-reduce, optimizer."""
    stage: int
    """The stage; -1 where it is of no stage."""
    microbatch: int
    """The micro-batch; -1 where it is of none."""
    start_s: float
    """When it begins and ends."""
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerForecast:
    """One place along the pipeline."""

    worker: int
    """Its place."""
    stages: tuple[int, ...]
    """Its stages."""
    compute_s: float
    """Computing, with what is done again."""
    recompute_s: float
    """Of it: running forward again."""
    tensor_s: float
    """Collectives of the tensor axis, and of the data axis as far as they are not hidden."""
    data_s: float
    optimizer_s: float
    """The optimiser's step."""
    idle_s: float
    """Doing nothing: waiting for messages or for others."""
    send_s: float
    """Links busy with what it sends and receives; beside computing."""
    receive_s: float
    memory: WorkerMemory
    """Its memory."""
    memory_limit_bytes: int | None
    """Memory of its device; None: not limited."""

    @property
    def fits(self) -> bool:
        """Whether the memory suffices."""
        return self.memory_limit_bytes is None or self.memory.peak_bytes <= self.memory_limit_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "stages": list(self.stages), "memory": self.memory.to_dict(), "fits": self.fits}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """What one edge of the pipeline carries in a step."""

    edge: int
    """The edge after this stage."""
    sender: int
    """The workers at its ends, by place along the pipeline."""
    receiver: int
    num_bytes: int
    """Bytes in a step, both ways, of one replica."""
    busy_s: float
    """Time that the link is busy, both ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUse:
    """What one worker gives to the collectives of an axis in a step, and to the links among its peers."""

    axis: Literal["data", "tensor", "tied"]
    """The axis, data or tensor; or tied: weights that two workers of a pipeline hold."""
    worker: int
    """The worker's place along the pipeline; its peers give as much."""
    num_workers: int
    """Workers that take part."""
    num_bytes: int
    """Bytes that are handed over, as a run counts them."""
    sent_bytes: int
    """Bytes on the link to the next worker of a ring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The predicted step of a plan on a cluster."""

    model: str
    """The model and the mesh."""
    mesh: str
    strategy: str
    num_workers: int
    schedule: str
    batch: int
    microbatches: int
    cuts: tuple[str, ...]
    """The units after which it is cut."""
    step_s: float
    """Time of a step."""
    samples_per_s: float
    """Samples a second."""
    serial_s: float
    """Time of the same batch on one device."""
    speedup: float
    """How much faster than that."""
    workers: tuple[WorkerForecast, ...]
    """One entry for each place along the pipeline."""
    links: tuple[LinkUse, ...]
    """One entry for each edge of the pipeline."""
    collectives: tuple[CollectiveUse, ...]
    """One entry for each place along the pipeline and axis with collectives."""
    tensor_bytes: int
    """Bytes that the busiest worker gives to collectives of the tensor and of the data axis."""
    data_bytes: int
    segments: tuple[Segment, ...] = field(default=(), repr=False)
    """The timeline."""

    @property
    def fits(self) -> bool:
        """Whether every device's memory suffices."""
        return all(worker.fits for worker in self.workers)

    @property
    def peak_memory_bytes(self) -> int:
        """The memory of the worker that needs most."""
        return max(worker.memory.peak_bytes for worker in self.workers)

    def to_dict(self, *, timeline: bool = True) -> dict[str, Any]:
        """As JSON has it."""
        plain = ("model", "mesh", "strategy", "num_workers", "schedule", "batch", "microbatches")
        return {
            **{name: getattr(self, name) for name in plain},
            "cuts": list(self.cuts),
            "step_s": self.step_s,
            "samples_per_s": self.samples_per_s,
            "serial_s": self.serial_s,
            "speedup": self.speedup,
            "fits": self.fits,
            "peak_memory_bytes": self.peak_memory_bytes,
            "workers": [worker.to_dict() for worker in self.workers],
            "links": [asdict(link) for link in self.links],
            "collectives": [asdict(one) for one in self.collectives],
            "tensor_bytes": self.tensor_bytes,
            "data_bytes": self.data_bytes,
            **({"timeline": [asdict(one) for one in self.segments]} if timeline else {}),
        }
