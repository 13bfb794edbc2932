"""The conditions of a split: micro-batches, devices, links, memory.

The profile is that of one micro-batch; a step sends `num_microbatches` of them through the pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stagewright.errors import UsageError

# Schedules whose memory a split can compute.
Schedule: TypeAlias = Literal["1f1b", "gpipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Everything that a split depends on besides the profile."""

    num_microbatches: int | None = 8
    """Micro-batches in a step; None: an endless stream, in which only the bottleneck counts."""
    training: bool | None = None
    """Forward and backward, or forward alone; None: as in the profile."""
    speeds: Sequence[float] | None = None
    """Speed of each device relative to the profiled one, in stage order; None: all 1."""
    bandwidth_bytes_per_s: float | None = None
    """Bandwidth of a link in each direction; None: infinite."""
    latency_s: float = 0.0
    """Latency of each P2P transfer."""
    overlap_links: bool = False
    """Whether P2P transfers overlap with compute; otherwise a stage waits for its sends."""
    memory_limit_bytes: int | Sequence[int] | None = None
    """Memory of every device, or of each device in stage order; None: not limited."""
    schedule: Schedule = "1f1b"
    """The schedule, which determines how many micro-batches a stage holds at once."""
    recompute: bool = False
    """Activation checkpointing: each unit saves only its inputs and recomputes forward in the backward pass."""
    optimizer_states: int = 2
    """Optimizer states per parameter, each as large as the parameter (Adam: 2, SGD: 0)."""
    client_first: int | None = None
    """Units at the start that `client-server` places on the client; None: the best number."""
    client_last: int | None = None
    """Units at the end that `client-server` places on the client; None: the best number."""

    def __post_init__(self) -> None:
        if self.num_microbatches is not None and self.num_microbatches < 1:
            raise UsageError(f"num_microbatches is {self.num_microbatches}, but a step needs at least 1")
        for speed in self.speeds or ():
            if not (math.isfinite(speed) and speed > 0):
                raise UsageError(f"a device speed of {speed} is not possible: give positive numbers (1: as profiled)")
        if self.bandwidth_bytes_per_s is not None and not self.bandwidth_bytes_per_s > 0:
            raise UsageError(
                f"a bandwidth of {self.bandwidth_bytes_per_s} bytes/s is not possible: give a positive number, "
                "or None for free links"
            )
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise UsageError(f"a latency of {self.latency_s} s is not possible: give 0 or more")
        limits = self.memory_limit_bytes
        for limit in (limits,) if isinstance(limits, int | float) else limits or ():
            if limit <= 0:
                raise UsageError(f"a memory limit of {limit} bytes is not possible: give a positive number")
        if self.schedule not in ("1f1b", "gpipe"):
            raise UsageError(f"unknown schedule {self.schedule!r}: use '1f1b' or 'gpipe'")
        if self.optimizer_states < 0:
            raise UsageError(f"optimizer_states is {self.optimizer_states}, but must be at least 0")
        if self.schedule == "gpipe" and self.num_microbatches is None:
            raise UsageError("schedule 'gpipe' holds every micro-batch of a step: give num_microbatches")

    def check_devices(self, num_devices: int, *, exactly: bool = True) -> None:
        """Raise an error if speeds or memory limits are for another number of devices."""
        for name, values in (("speeds", self.speeds), ("memory limits", self.memory_limit_bytes)):
            if values is None or isinstance(values, int | float):
                continue
            if len(values) != num_devices if exactly else len(values) < num_devices:
                raise UsageError(
                    f"{len(values)} {name} were given for {num_devices} devices: give "
                    f"{num_devices} values, one for each device in stage order"
                )

    def speed(self, device: int) -> float:
        """Return the speed of a device relative to the profiled one."""
        return 1.0 if self.speeds is None else float(self.speeds[device])

    def memory_limit(self, device: int) -> int | None:
        """Return the memory limit of a device, if any."""
        limits = self.memory_limit_bytes
        if limits is None or isinstance(limits, int | float):
            return limits
        return limits[device]

    def link_s(self, num_bytes: int, *, training: bool) -> float:
        """Return the time of a link for one micro-batch: the activation, and in training the gradient of equal size."""
        transfer_s = self.latency_s
        if self.bandwidth_bytes_per_s is not None:
            transfer_s += num_bytes / self.bandwidth_bytes_per_s
        return 2 * transfer_s if training else transfer_s

    def in_flight(self, stage: int, num_stages: int) -> int:
        """Return how many micro-batches a stage holds at once between forward and backward."""
        if self.schedule == "gpipe":
            assert self.num_microbatches is not None
            return self.num_microbatches
        remaining = num_stages - stage
        return remaining if self.num_microbatches is None else min(self.num_microbatches, remaining)
