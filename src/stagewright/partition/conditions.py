"""Under which conditions a split is to work: micro-batches, devices, links, memory.

The profile is that of one micro-batch; a step takes `num_microbatches` of them through the pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stagewright.errors import UsageError

__all__ = ["Conditions", "Schedule"]

# Schedules whose memory a split can tell.
Schedule: TypeAlias = Literal["1f1b", "gpipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What is given beside the profile; every default is the plain case."""

    num_microbatches: int | None = 8
    """Micro-batches in a step; None is an endless stream, where only the slowest device counts."""
    training: bool | None = None
    """Forward and backward, or forward alone; None is as the profile was measured."""
    speeds: Sequence[float] | None = None
    """Speed of each device, relative to the profiled one, in the order of the stages; None: all are 1."""
    bandwidth_bytes_per_s: float | None = None
    """Bytes a second that a link carries in each direction; None: its bytes cost no time."""
    latency_s: float = 0.0
    """Time that each message takes beside its bytes."""
    overlap_links: bool = False
    """Whether links work while stages compute; otherwise a stage waits for what it sends."""
    memory_limit_bytes: int | Sequence[int] | None = None
    """Memory of a device, or of each device in the order of the stages; None: not limited."""
    schedule: Schedule = "1f1b"
    """Which schedule says how many micro-batches a stage holds at once."""
    recompute: bool = False
    """Whether each unit keeps its inputs only and runs forward again in the backward pass."""
    optimizer_states: int = 2
    """States that the optimiser keeps for a parameter, each as large as the parameter (Adam: 2, plain SGD: 0)."""
    client_first: int | None = None
    """Units at the start and at the end that `client-server` places on the client; None: as many as is best."""
    client_last: int | None = None

    def __post_init__(self) -> None:
        if self.num_microbatches is not None and self.num_microbatches < 1:
            raise UsageError(f"num_microbatches is {self.num_microbatches}, but a step needs at least 1")
        for speed in self.speeds or ():
            if not (math.isfinite(speed) and speed > 0):
                raise UsageError(f"a device speed of {speed} is not possible: give positive numbers, 1 = as profiled")
        if self.bandwidth_bytes_per_s is not None and not self.bandwidth_bytes_per_s > 0:
            raise UsageError(
                f"a bandwidth of {self.bandwidth_bytes_per_s} bytes/s is not possible: give a positive number, "
                "or none for free links"
            )
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise UsageError(f"a latency of {self.latency_s} s is not possible: give 0 or more")
        limits = self.memory_limit_bytes
        for limit in (limits,) if isinstance(limits, int | float) else limits or ():
            if limit <= 0:
                raise UsageError(f"a memory limit of {limit} bytes is not possible: give a positive number")
        if self.schedule not in ("1f1b", "gpipe"):
            raise UsageError(f"schedule {self.schedule!r} is not known: use '1f1b' or 'gpipe'")
        if self.optimizer_states < 0:
            raise UsageError(f"optimizer_states is {self.optimizer_states}, but can't be below 0")
        if self.schedule == "gpipe" and self.num_microbatches is None:
            raise UsageError("schedule 'gpipe' holds every micro-batch of a step: give num_microbatches")

    def check_devices(self, num_devices: int, *, exactly: bool = True) -> None:
        """Refuse speeds or memory limits for another number of devices."""
        for what, given in (("speeds", self.speeds), ("memory limits", self.memory_limit_bytes)):
            if given is None or isinstance(given, int | float):
                continue
            if len(given) != num_devices if exactly else len(given) < num_devices:
                raise UsageError(
                    f"{len(given)} {what} were given for {num_devices} devices: give "
                    f"{num_devices} values, one for each device in the order of the stages"
                )

    def speed(self, device: int) -> float:
        """How fast the device is, relative to the profiled one."""
        return 1.0 if self.speeds is None else float(self.speeds[device])

    def memory_limit(self, device: int) -> int | None:
        """The memory of the device, if it is limited."""
        limits = self.memory_limit_bytes
        if limits is None or isinstance(limits, int | float):
            return limits
        return limits[device]

    def link_s(self, num_bytes: int, *, training: bool) -> float:
        """Time of one link for one micro-batch: there, and in training the gradient, as large, back."""
        once = self.latency_s
        if self.bandwidth_bytes_per_s is not None:
            once += num_bytes / self.bandwidth_bytes_per_s
        return 2 * once if training else once

    def in_flight(self, stage: int, num_stages: int) -> int:
        """How many micro-batches the stage holds at once between their forward and backward."""
        if self.schedule == "gpipe":
            assert self.num_microbatches is not None
            return self.num_microbatches
        warm = num_stages - stage
        return warm if self.num_microbatches is None else min(self.num_microbatches, warm)
