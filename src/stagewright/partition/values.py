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

    index: int
    """Position in the pipeline."""
    device: int
    """Index of the device that it runs on."""
    first: int
    """Index of its first unit."""
    last: int
    """Index of its last unit, included."""
    units: tuple[str, ...]
    """Names of its units, in order."""
    parameters: int
    """Parameters, shared ones counted once."""
    macs: int
    """Multiply-accumulates of one forward pass."""
    forward_s: float
    """Forward time on its device."""
    backward_s: float
    """Backward time on its device, with the second forward pass where units are recomputed; 0 for inference."""
    link_s: float
    """Time of the link after it, in training both ways; 0 for the last stage and for free links."""
    time_s: float
    """What one micro-batch costs in all: forward, backward and link."""
    busy_s: float
    """How long it is busy with one micro-batch: time_s, or with overlapped links the longer of computing and sending.
    """
    sends_bytes: int
    """Bytes that it sends forward; in training the same comes back as gradient."""
    in_flight: int
    """Micro-batches that it holds at once."""
    memory_bytes: int
    """Memory that it needs (see `memory`)."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "units": list(self.units)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCost:
    """One device: the sum of its stages, mostly of one."""

    device: int
    """Its index."""
    busy_s: float
    """How long it is busy with one micro-batch."""
    memory_bytes: int
    """Memory that its stages need, parameters that they share counted once."""
    memory_limit_bytes: int | None
    """What it has; None: not limited."""

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

    policy: str
    """The policy that chose it."""
    model: str
    """The model's name."""
    training: bool
    """Forward and backward, or forward alone."""
    num_microbatches: int | None
    """Micro-batches in a step; None: an endless stream."""
    cuts: tuple[int, ...]
    """Indices of the units that it is cut after."""
    cut_names: tuple[str, ...]
    """Their names."""
    stages: tuple[StageCost, ...]
    """The stages in order."""
    devices: tuple[DeviceCost, ...]
    """The devices by index."""
    bottleneck_s: float
    """The busiest device's time for one micro-batch."""
    balance: float
    """Mean over devices of their busy time / the busiest's: 1 is perfect balance."""
    step_s: float | None
    """Time of one step; None for an endless stream."""
    serial_s: float
    """Time of one micro-batch on the fastest device alone, without links and recomputation."""
    speedup_bound: float
    """How much faster than that the split can be at best: m · serial_s / step_s."""

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

    policy: str
    """The policy's name."""
    reason: str
    """Why, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The splits of several policies, in the order asked for; iterates over them."""

    splits: tuple[Split, ...]
    """One split a policy that could be applied."""
    skipped: tuple[Skipped, ...] = ()
    """The policies that could not."""

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
