"""A cluster, real or hypothetical: devices and the links between them.

Devices come in groups of the same kind on the same host; a link connects two devices of one host or of two hosts. A
message of n bytes takes latency + n / bandwidth.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stagewright.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Identical devices."""

    kind: Literal["cpu", "cuda"]
    """A CPU device is a pinned set of cores."""
    count: int
    """Devices on each host."""
    memory_bytes: int | None = None
    """Memory of each device; None: unlimited."""
    speed: float = 1.0
    """Speed of each device, relative to the profiled one."""
    cores: int = 1
    """Cores of each CPU device."""
    host: str = "local"
    hosts: int = 1
    """Identical hosts, each with `count` devices."""
    hardware: str | None = None
    """Name of the processor or GPU."""
    peak_flops: float | None = None
    """Dense 16-bit operations per second, for analytic forecasts; None: known by `hardware`, as those below."""
    peak_flops_32: float | None = None
    """32-bit operations per second."""
    memory_bandwidth: float | None = None
    """Bytes per second of the device's memory."""
    num_sms: int | None = None
    """Streaming multiprocessors of a GPU."""
    price: float | None = None
    """Cost of one device for an hour."""

    def __post_init__(self) -> None:
        if self.kind not in ("cpu", "cuda"):
            raise UsageError(f'unknown kind of device {self.kind!r}: use "cpu" or "cuda"')
        for name, value in (
            ("count", self.count),
            ("cores", self.cores),
            ("hosts", self.hosts),
            ("memory", self.memory_bytes),
            ("peak_flops", self.peak_flops),
            ("peak_flops_32", self.peak_flops_32),
            ("memory_bandwidth", self.memory_bandwidth),
            ("num_sms", self.num_sms),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{name} = {value}, but a device needs at least 1")
        if self.price is not None and not (math.isfinite(self.price) and self.price >= 0):
            raise UsageError(f"price = {self.price}, but must be at least 0 per device and hour")
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise UsageError(f"speed = {self.speed}, but must be above 0; 1 is as fast as the profiled device")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection between two devices, in each direction."""

    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0:
            raise UsageError(f"bandwidth = {self.bandwidth_bytes_per_s} bytes/s, but must be above 0; inf is free")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise UsageError(f"latency = {self.latency_s} s, but must be at least 0")

    def message_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


FREE = Link(bandwidth_bytes_per_s=math.inf, latency_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of a cluster."""

    intra_host: Link = FREE
    """Between two devices of one host."""
    inter_host: Link | None = None
    """Between two devices of different hosts; None for a single host."""
    collective: Link | None = None
    """Link as seen by a step of a collective on one host; None: as for messages."""
    host: Link | None = None
    """Between a device and its host's memory, for offloaded activations; None: unknown."""
    sums: tuple[tuple[int, float], ...] = ()
    """Measured all-reduces of two devices of one host: bytes and seconds, ascending; (): from ``collective``."""
    tensor: Link | None = None
    """As ``collective``, in a tensor group, whose CPU workers share memory; None: as in other groups."""
    tensor_sums: tuple[tuple[int, float], ...] = ()
    """As ``sums``, in a tensor group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices and links."""

    devices: tuple[DeviceGroup, ...]
    links: Links = Links()

    def __post_init__(self) -> None:
        if not self.devices:
            raise UsageError("a cluster needs at least one device: add [[devices]] with a kind and a count")
        hosts = {group.host: group.hosts for group in self.devices}
        if sum(hosts.values()) > 1 and self.links.inter_host is None:
            raise UsageError(
                f"the devices are on {sum(hosts.values())} hosts ({', '.join(hosts)}), but no link between hosts is "
                "given: add [links.inter_host] with a bandwidth and a latency"
            )

    @property
    def num_devices(self) -> int:
        """Number of devices in all groups."""
        return sum(group.count * group.hosts for group in self.devices)

    def price_per_hour(self, num_devices: int) -> float | None:
        """Return the cost of the first `num_devices` devices for an hour; None if some state no price."""
        total, left = 0.0, num_devices
        for group in self.devices:
            used = min(left, group.count * group.hosts)
            if used and group.price is None:
                return None
            total += used * (group.price or 0.0)
            left -= used
        return total

    @property
    def members(self) -> tuple[DeviceGroup, ...]:
        """The group of each device, in order."""
        return tuple(group for group in self.devices for _ in range(group.count * group.hosts))

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """The host of each device, in order: its name, and its index among identical hosts."""
        return tuple(
            (group.host, number) for group in self.devices for number in range(group.hosts) for _ in range(group.count)
        )

    @property
    def devices_per_host(self) -> int | None:
        """Devices of the smallest of several hosts; None: one host."""
        counts = Counter(self.places)
        return min(counts.values()) if len(counts) > 1 else None

    def link(self, first: int, second: int) -> Link:
        """Return the link between two devices, by their indices in `members`."""
        places = self.places
        if first == second:
            return FREE
        if places[first] == places[second]:
            return self.links.intra_host
        assert self.links.inter_host is not None
        return self.links.inter_host

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
