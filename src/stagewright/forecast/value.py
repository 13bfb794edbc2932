"""A forecast: the predicted step of a plan, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from stagewright.forecast.memory import WorkerMemory

__all__ = ["CollectiveUse", "Forecast", "LinkUse", "Segment", "Stream", "WorkerForecast"]

Stream: TypeAlias = Literal["compute", "tensor", "data", "send", "receive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Something that a worker does for a while."""

    # The worker's place along the pipeline; its peers along data and tensor do the same.
    worker: int
    # Which of the worker's streams.
    stream: Stream
    # What: F, B, I, W, message, all-reduce, optimizer.
    name: str
    # The stage; -1 where it is of no stage.
    stage: int
    # The micro-batch; -1 where it is of none.
    microbatch: int
    # When it begins and ends.
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerForecast:
    """One place along the pipeline."""

    # Its place.
    worker: int
    # Its stages.
    stages: tuple[int, ...]
    # Computing, with what is done again.
    compute_s: float
    # Of it: running forward again.
    recompute_s: float
    # Collectives of the tensor axis, and of the data axis as far as they are not hidden.
    tensor_s: float
    data_s: float
    # The optimiser's step.
    optimizer_s: float
    # Doing nothing: waiting for messages or for others.
    idle_s: float
    # Links busy with what it sends and receives; beside computing.
    send_s: float
    receive_s: float
    # Its memory.
    memory: WorkerMemory
    # Memory of its device; None: not limited.
    memory_limit_bytes: int | None

    @property
    def fits(self) -> bool:
        """Whether the memory suffices."""
        return self.memory_limit_bytes is None or self.memory.peak_bytes <= self.memory_limit_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "stages": list(self.stages), "memory": self.memory.to_dict(), "fits": self.fits}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """What one edge of the pipeline carries in a step."""

    # The edge after this stage.
    edge: int
    # The workers at its ends, by place along the pipeline.
    sender: int
    receiver: int
    # Bytes in a step, both ways, of one replica.
    num_bytes: int
    # Time that the link is busy, both ways.
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUse:
    """What one worker gives to the collectives of an axis in a step, and to the links among its peers."""

    # The axis, data or tensor; or tied: weights that two workers of a pipeline hold.
    axis: Literal["data", "tensor", "tied"]
    # The worker's place along the pipeline; its peers give as much.
    worker: int
    # Workers that take part.
    num_workers: int
    # Bytes that are handed over, as a run counts them.
    num_bytes: int
    # Bytes on the link to the next worker of a ring.
    sent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The predicted step of a plan on a cluster."""

    # The model and the mesh.
    model: str
    mesh: str
    strategy: str
    num_workers: int
    schedule: str
    batch: int
    microbatches: int
    # The units after which it is cut.
    cuts: tuple[str, ...]
    # Time of a step.
    step_s: float
    # Samples a second.
    samples_per_s: float
    # Time of the same batch on one device.
    serial_s: float
    # How much faster than that.
    speedup: float
    # One entry for each place along the pipeline.
    workers: tuple[WorkerForecast, ...]
    # One entry for each edge of the pipeline.
    links: tuple[LinkUse, ...]
    # One entry for each place along the pipeline and axis with collectives.
    collectives: tuple[CollectiveUse, ...]
    # Bytes that the busiest worker gives to collectives of the tensor and of the data axis.
    tensor_bytes: int
    data_bytes: int
    # The timeline.
    segments: tuple[Segment, ...] = field(default=(), repr=False)

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
