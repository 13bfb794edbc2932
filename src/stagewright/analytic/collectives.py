"""Time of collectives on a cluster of hosts, as NCCL runs them.

Inside a host, rings (or NVLS, for all-reduces of four devices and more) run at a share of the link's bandwidth. Across
hosts, each device of the group that sits on a host brings its own network adapter, so a group with k devices on each
host moves k adapters' bytes; small messages use trees, whose latency grows with the logarithm of the hosts.

    all-reduce        2 (n-1)/n · S / B          all-gather, reduce-scatter     (n-1)/n · S / B
    all-to-all          (n-1)/n · S / B          point-to-point                 S / B
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

Collective: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group: its size, and how many of its ranks share a host."""

    size: int
    per_host: int

    @property
    def num_hosts(self) -> int:
        return math.ceil(self.size / self.per_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Links of a cluster of equal hosts."""

    devices_per_host: int
    intra_bytes_per_s: float
    """Per device and direction, inside a host."""
    intra_latency_s: float
    inter_bytes_per_s: float
    """Per device, between hosts."""
    inter_latency_s: float
    intra_share: float = 0.80
    """Share of the link that large collectives inside a host reach."""
    inter_share: float = 0.80
    """Share of the network adapters that large collectives reach."""
    overhead_s: float = 12e-6
    """Start of a collective: launch and synchronization of its ranks."""

    def group(self, size: int, stride: int) -> Group:
        """Return the group of `size` ranks that are `stride` apart."""
        per_host = max(1, min(size, self.devices_per_host // stride)) if stride <= self.devices_per_host else 1
        return Group(size=size, per_host=per_host)

    def collective_s(self, kind: Collective, group: Group, num_bytes: float) -> float:
        """Return the time of a collective over `num_bytes`, the size of the whole tensor."""
        size = group.size
        if size == 1 or num_bytes == 0:
            return 0.0
        share = (size - 1) / size * num_bytes
        passes = 2 if kind == "all_reduce" else 1
        intra = self.intra_bytes_per_s * self.intra_share
        if group.num_hosts == 1:
            steps = passes * (size - 1)
            return self.overhead_s + steps * self.intra_latency_s + passes * share / intra
        adapters = self.inter_bytes_per_s * self.inter_share * group.per_host
        if kind == "all_to_all":
            outside = num_bytes * (size - group.per_host) / size
            return (
                self.overhead_s
                + (size - 1) * self.inter_latency_s / 4
                + max(outside / (self.inter_bytes_per_s * self.inter_share), share / intra)
            )
        ring_latency = passes * (
            (group.num_hosts - 1) * self.inter_latency_s + (size - group.num_hosts) * self.intra_latency_s
        )
        tree_latency = 2 * (
            math.log2(group.num_hosts) * self.inter_latency_s + (group.per_host - 1) * self.intra_latency_s
        )
        latency = min(ring_latency, tree_latency) if kind == "all_reduce" else ring_latency
        return self.overhead_s + latency + passes * share / min(adapters, intra)

    def bucketed_s(self, kind: Collective, group: Group, num_bytes: float, bucket_bytes: float) -> float:
        """Return the time of a tensor that is sent in buckets, each with its own latency."""
        count = max(1, math.ceil(num_bytes / bucket_bytes))
        return count * self.collective_s(kind, group, num_bytes / count)

    def message_s(self, num_bytes: float, stride: int) -> float:
        """Return the time of a point-to-point message between ranks that are `stride` apart."""
        if stride < self.devices_per_host:
            return self.overhead_s + self.intra_latency_s + num_bytes / (self.intra_bytes_per_s * self.intra_share)
        return self.overhead_s + self.inter_latency_s + num_bytes / (self.inter_bytes_per_s * self.inter_share)
