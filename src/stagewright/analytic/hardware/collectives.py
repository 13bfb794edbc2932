"""Time of collectives on a cluster of hosts, as NCCL runs them.

Inside a host, rings run at a share of the link's bandwidth; switches that add (NVLS) speed up all-reduces of more than
four devices. Across hosts, each device of the group that sits on a host brings its own network adapter, so a group with
k devices on each host moves k adapters' bytes. An all-reduce uses a ring or a tree, whichever is faster for its size: a
tree's latency grows with the logarithm of the hosts, but it moves more bytes. Small tensors are sent with a protocol
that has less latency and less bandwidth, where it is faster.

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

# Above this size the simple protocol is the fastest, and the others are not tried.
_SMALL_BYTES = 8 << 20

Collective: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How NCCL signals that data has arrived, relative to its simple protocol."""

    start_s: float = 0.0
    """Start of a collective."""
    intra_latency: float = 1.0
    inter_latency: float = 1.0
    rate: float = 1.0


# NCCL's own estimates (src/graph/tuning.cc: baseLat, hwLat and "model refinements" of rings). LL sends a flag with
# every four bytes of data, LL128 with every 120; the latter needs NVLink, so it is used inside hosts only.
_SIMPLE = Protocol()
_LL = Protocol(start_s=(3.6 - 8.4) * 1e-6, intra_latency=0.47 / 3.4, inter_latency=2.7 / 9.6, rate=1 / 4)
_LL128 = Protocol(start_s=(10.0 - 8.4) * 1e-6, intra_latency=1.9 / 3.4, rate=0.92)


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
    """Share of the network adapters that large collectives reach: an estimate, as inside a host."""
    nvls_share: float = 0.0
    """Bytes per second of an all-reduce inside the switches of a host, over the link's; 0: they can't add."""
    overhead_s: float = 12e-6
    """Start of a collective: launch and synchronization of its ranks; an estimate."""

    def group(self, size: int, stride: int) -> Group:
        """Return the group of `size` ranks that are `stride` apart."""
        per_host = max(1, min(size, self.devices_per_host // stride)) if stride <= self.devices_per_host else 1
        return Group(size=size, per_host=per_host)

    def collective_s(self, kind: Collective, group: Group, num_bytes: float) -> float:
        """Return the time of a collective over `num_bytes`, the size of the whole tensor."""
        if group.size == 1 or num_bytes == 0:
            return 0.0
        if num_bytes > _SMALL_BYTES:
            return self._protocol_s(kind, group, num_bytes, _SIMPLE)
        protocols = (_SIMPLE, _LL, _LL128) if group.num_hosts == 1 else (_SIMPLE, _LL)
        return min(self._protocol_s(kind, group, num_bytes, protocol) for protocol in protocols)

    def _protocol_s(self, kind: Collective, group: Group, num_bytes: float, protocol: Protocol) -> float:
        """Return the time of a collective with one protocol."""
        size = group.size
        share = (size - 1) / size * num_bytes
        passes = 2 if kind == "all_reduce" else 1
        intra = self.intra_bytes_per_s * self.intra_share * protocol.rate
        inter = self.inter_bytes_per_s * self.inter_share * protocol.rate
        intra_latency_s = self.intra_latency_s * protocol.intra_latency
        inter_latency_s = self.inter_latency_s * protocol.inter_latency
        start_s = max(0.0, self.overhead_s + protocol.start_s)
        if group.num_hosts == 1:
            ring = passes * ((size - 1) * intra_latency_s + share / intra)
            if kind == "all_reduce" and self.nvls_share and size > _NVLS_RANKS:
                in_switch = 2 * self.intra_latency_s + num_bytes / (self.intra_bytes_per_s * self.nvls_share)
                return min(start_s + ring, self.overhead_s + in_switch)
            return start_s + ring
        if kind == "all_to_all":
            outside = num_bytes * (size - group.per_host) / size
            return start_s + (size - 1) * inter_latency_s / 4 + max(outside / inter, share / intra)
        rate = min(inter * group.per_host, intra)
        ring = passes * (
            (group.num_hosts - 1) * inter_latency_s + (size - group.num_hosts) * intra_latency_s + share / rate
        )
        if kind != "all_reduce":
            return start_s + ring
        tree = 2 * (math.log2(group.num_hosts) * inter_latency_s + (group.per_host - 1) * intra_latency_s)
        return start_s + min(ring, tree + 2 * num_bytes / (_TREE_SHARE * rate))

    def bucketed_s(self, kind: Collective, group: Group, num_bytes: float, bucket_bytes: float) -> float:
        """Return the time of a tensor that is sent in buckets, each with its own latency."""
        count = max(1, math.ceil(num_bytes / bucket_bytes))
        return count * self.collective_s(kind, group, num_bytes / count)

    def message_s(self, num_bytes: float, stride: int) -> float:
        """Return the time of a point-to-point message between ranks that are `stride` apart."""
        if stride < self.devices_per_host:
            return self.overhead_s + self.intra_latency_s + num_bytes / (self.intra_bytes_per_s * self.intra_share)
        return self.overhead_s + self.inter_latency_s + num_bytes / (self.inter_bytes_per_s * self.inter_share)

    def ring_step_s(self, group: Group, num_bytes: float) -> float:
        """Return the time in which each rank of a group sends a message to the next: that of the slowest link."""
        return self.message_s(num_bytes, 0 if group.num_hosts == 1 else self.devices_per_host)
