"""A split of a model into stages, and what each stage and each device has to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from stagewright.errors import UnknownName

__all__ = ["Comparison", "DeviceCost", "Skipped", "Split", "StageCost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One stage: its units and what one micro-batch costs there."""

    # Position in the pipeline.
    index: int
    # Index of the device that it runs on.
    device: int
    # Index of its first unit.
    first: int
    # Index of its last unit, included.
    last: int
    # Names of its units, in order.
    units: tuple[str, ...]
    # Parameters, shared ones counted once.
    parameters: int
    # Multiply-accumulates of one forward pass.
    macs: int
    # Forward time on its device.
    forward_s: float
    # Backward time on its device, with the second forward pass where units are recomputed; 0 for inference.
    backward_s: float
    # Time of the link after it, in training both ways; 0 for the last stage and for free links.
    link_s: float
    # What one micro-batch costs in all: forward, backward and link.
    time_s: float
    # How long it is busy with one micro-batch: time_s, or with overlapped links the longer of computing and sending.
    busy_s: float
    # Bytes that it sends forward; in training the same comes back as gradient.
    sends_bytes: int
    # Micro-batches that it holds at once.
    in_flight: int
    # Memory that it needs (see `memory`).
    memory_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "units": list(self.units)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCost:
    """One device: the sum of its stages, mostly of one."""

    # Its index.
    device: int
    # How long it is busy with one micro-batch.
    busy_s: float
    # Memory that its stages need, parameters that they share counted once.
    memory_bytes: int
    # What it has; None: not limited.
    memory_limit_bytes: int | None

    @property
    def fits(self) -> bool:
        """Whether the memory suffices."""
        return self.memory_limit_bytes is None or self.memory_bytes <= self.memory_limit_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Where a model is cut, and what comes of it.

    A step of m micro-batches takes the first one through all stages, then one more each time that the busiest
    device is ready:  step_s = Σ time_s + (m - 1) · bottleneck_s.  For inference that is exact; for training it is
    the estimate that planners use: a schedule may hide a little of the fill, and may lose more by waiting.
    """

    # The policy that chose it.
    policy: str
    # The model's name.
    model: str
    # Forward and backward, or forward alone.
    training: bool
    # Micro-batches in a step; None: an endless stream.
    num_microbatches: int | None
    # Indices of the units that it is cut after.
    cuts: tuple[int, ...]
    # Their names.
    cut_names: tuple[str, ...]
    # The stages in order.
    stages: tuple[StageCost, ...]
    # The devices by index.
    devices: tuple[DeviceCost, ...]
    # The busiest device's time for one micro-batch.
    bottleneck_s: float
    # Mean over devices of their busy time / the busiest's: 1 is perfect balance.
    balance: float
    # Time of one step; None for an endless stream.
    step_s: float | None
    # Time of one micro-batch on the fastest device alone, without links and recomputation.
    serial_s: float
    # How much faster than that the split can be at best: m · serial_s / step_s.
    speedup_bound: float

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def placement(self) -> tuple[int, ...]:
        """The device of each stage."""
        return tuple(stage.device for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether every device's memory suffices."""
        return all(device.fits for device in self.devices)

    @property
    def sends_bytes(self) -> int:
        """Bytes that cross all cuts in one forward pass."""
        return sum(stage.sends_bytes for stage in self.stages)

    @property
    def peak_memory_bytes(self) -> int:
        """The memory of the device that needs most."""
        return max(device.memory_bytes for device in self.devices)

    def to_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "model": self.model,
            "training": self.training,
            "num_microbatches": self.num_microbatches,
            "num_stages": self.num_stages,
            "num_devices": len(self.devices),
            "cuts": list(self.cuts),
            "cut_names": list(self.cut_names),
            "placement": list(self.placement),
            "bottleneck_s": self.bottleneck_s,
            "balance": self.balance,
            "step_s": self.step_s,
            "serial_s": self.serial_s,
            "speedup_bound": self.speedup_bound,
            "sends_bytes": self.sends_bytes,
            "peak_memory_bytes": self.peak_memory_bytes,
            "fits": self.fits,
            "stages": [stage.to_dict() for stage in self.stages],
            "devices": [device.to_dict() for device in self.devices],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A policy that can't be applied to this model."""

    # The policy's name.
    policy: str
    # Why, in one sentence.
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The splits of several policies, in the order asked for; iterates over them."""

    # One split a policy that could be applied.
    splits: tuple[Split, ...]
    # The policies that could not.
    skipped: tuple[Skipped, ...] = ()

    def __iter__(self) -> Iterator[Split]:
        return iter(self.splits)

    def __len__(self) -> int:
        return len(self.splits)

    def __getitem__(self, key: int | str) -> Split:
        """A split by its position or by its policy."""
        if isinstance(key, int):
            return self.splits[key]
        known = {split.policy: split for split in self.splits}
        if key not in known:
            raise UnknownName("policy", key, known)
        return known[key]

    def to_dict(self) -> dict[str, Any]:
        return {
            "policies": [split.to_dict() for split in self.splits],
            "skipped": [asdict(one) for one in self.skipped],
        }
