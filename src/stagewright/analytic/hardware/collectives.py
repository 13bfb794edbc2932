"""Time of collectives on a cluster of hosts, as NCCL runs them.

Inside a host, rings run at a share of the link's bandwidth; switches that add (NVLS) speed up all-reduces of more than
four devices. Across hosts, each device of the group that sits on a host brings its own network adapter, so a group with
k devices on each host moves k adapters' bytes. An all-reduce uses a ring or a tree, whichever is faster for its size: a
tree's latency grows with the logarithm of the hosts, but it moves more bytes.

    all-reduce        2 (n-1)/n · S / B          all-gather, reduce-scatter     (n-1)/n · S / B
    all-to-all          (n-1)/n · S / B          point-to-point                 S / B
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

# NVLS: at 8 H100, 275 of 450 GB/s for the bytes of an all-reduce; up to four devices it is no faster than a ring
# (NVIDIA/nccl-tests issue 212, NVIDIA/nccl issue 1455). Trees reach 0.92 of a ring's link rate (NCCL's tuning).
_NVLS_RANKS = 4
_TREE_SHARE = 0.92

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
    nvls_share: float = 0.0
    """Bytes per second of an all-reduce inside the switches of a host, over the link's; 0: they can't add."""
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
            ring = passes * ((size - 1) * self.intra_latency_s + share / intra)
            if kind == "all_reduce" and self.nvls_share and size > _NVLS_RANKS:
                in_switch = 2 * self.intra_latency_s + num_bytes / (self.intra_bytes_per_s * self.nvls_share)
                return self.overhead_s + min(ring, in_switch)
            return self.overhead_s + ring
        adapters = self.inter_bytes_per_s * self.inter_share * group.per_host
        if kind == "all_to_all":
            outside = num_bytes * (size - group.per_host) / size
            return (
                self.overhead_s
                + (size - 1) * self.inter_latency_s / 4
                + max(outside / (self.inter_bytes_per_s * self.inter_share), share / intra)
            )
        rate = min(adapters, intra)
        ring = passes * (
            (group.num_hosts - 1) * self.inter_latency_s
            + (size - group.num_hosts) * self.intra_latency_s
            + share / rate
        )
        if kind != "all_reduce":
            return self.overhead_s + ring
        tree = 2 * (math.log2(group.num_hosts) * self.inter_latency_s + (group.per_host - 1) * self.intra_latency_s)
        return self.overhead_s + min(ring, tree + 2 * num_bytes / (_TREE_SHARE * rate))

    def bucketed_s(self, kind: Collective, group: Group, num_bytes: float, bucket_bytes: float) -> float:
        """Return the time of a tensor that is sent in buckets, each with its own latency."""
        count = max(1, math.ceil(num_bytes / bucket_bytes))
        return count * self.collective_s(kind, group, num_bytes / count)

    def message_s(self, num_bytes: float, stride: int) -> float:
        """Return the time of a point-to-point message between ranks that are `stride` apart."""
        if stride < self.devices_per_host:
            return self.overhead_s + self.intra_latency_s + num_bytes / (self.intra_bytes_per_s * self.intra_share)
        return self.overhead_s + self.inter_latency_s + num_bytes / (self.inter_bytes_per_s * self.inter_share)
