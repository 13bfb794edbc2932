"""The forecast of a plan's step, as plain values. `simulate` computes it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from stagewright.display import Displayed
from stagewright.simulator.memory import WorkerMemory

Stream: TypeAlias = Literal["compute", "tensor", "data", "send", "receive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One entry of the timeline."""

    worker: int
    """Pipeline index of the worker; its data and tensor peers behave identically."""
    stream: Stream
    name: str
    """F, B, I, W, message, gradient, all-reduce or optimizer."""
    stage: int
    """-1 if none."""
    microbatch: int
    """-1 if none."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerForecast:
    """One worker of the pipeline."""

    worker: int
    """Pipeline index."""
    stages: tuple[int, ...]
    compute_s: float
    """Forward and backward, including recomputation."""
    recompute_s: float
    """Recomputation, included in compute_s."""
    tensor_s: float
    """Tensor all-reduces."""
    data_s: float
    """Exposed collectives of the data axis."""
    optimizer_s: float
    idle_s: float
    """Waiting for P2P transfers or other workers."""
    send_s: float
    """Link time of its sends, overlapped with compute."""
    receive_s: float
    """Link time of its receives."""
    memory: WorkerMemory
    memory_limit_bytes: int | None
    """Memory of its device; None: no limit."""

    @property
    def fits(self) -> bool:
        """Whether its peak memory is within the limit."""
        return self.memory_limit_bytes is None or self.memory.peak_bytes <= self.memory_limit_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "stages": list(self.stages), "memory": self.memory.to_dict(), "fits": self.fits}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """P2P traffic of one pipeline edge in a step."""

    edge: int
    """Index of the stage before it."""
    sender: int
    """Pipeline index of the worker before it."""
    receiver: int
    """Pipeline index of the worker behind it."""
    num_bytes: int
    """Bytes per step in both directions, for one replica."""
    busy_s: float
    """Link time in both directions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUse:
    """One worker's collectives along an axis in a step."""

    axis: Literal["data", "tensor", "expert", "tied"]
    """data, tensor, expert, or tied: weights that two pipeline workers hold."""
    worker: int
    """Pipeline index of the worker."""
    num_workers: int
    """Size of the process group."""
    num_bytes: int
    """Bytes of the tensors, as a run counts them."""
    sent_bytes: int
    """Bytes sent to the next worker of the ring, or with balanced experts to the other workers of an all-to-all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast(Displayed):
    """The predicted step of a plan on a cluster."""

    model: str
    mesh: str
    strategy: str
    num_workers: int
    schedule: str
    batch: int
    microbatches: int
    cuts: tuple[str, ...]
    """Units after which the model is cut."""
    step_s: float
    samples_per_s: float
    serial_s: float
    """Step time of the same batch on one device."""
    speedup: float
    """serial_s over step_s."""
    workers: tuple[WorkerForecast, ...]
    """One entry per pipeline worker."""
    links: tuple[LinkUse, ...]
    """One entry per pipeline edge between workers."""
    collectives: tuple[CollectiveUse, ...]
    """One entry per pipeline worker and axis with collectives."""
    tensor_bytes: int
    """Largest tensor all-reduce traffic of any worker."""
    data_bytes: int
    """Largest data-axis traffic of any worker."""
    segments: tuple[Segment, ...] = field(default=(), repr=False)
    """The timeline."""

    @property
    def fits(self) -> bool:
        """Whether every worker's peak memory is within its limit."""
        return all(worker.fits for worker in self.workers)

    @property
    def peak_memory_bytes(self) -> int:
        """The largest peak memory of any worker."""
        return max(worker.memory.peak_bytes for worker in self.workers)

    def to_dict(self, *, timeline: bool = True) -> dict[str, Any]:
        """Convert to JSON values."""
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
            "collectives": [asdict(collective) for collective in self.collectives],
            "tensor_bytes": self.tensor_bytes,
            "data_bytes": self.data_bytes,
            **({"timeline": [asdict(segment) for segment in self.segments]} if timeline else {}),
        }
