"""Clusters by name: `8xh100` is one host with eight devices, `32x8xa100` has 32 such hosts."""

from __future__ import annotations

import re

from stagewright.analytic.hardware.collectives import Network
from stagewright.analytic.hardware.devices import accelerator_of, accelerators, find_accelerator
from stagewright.analytic.layout import Layout
from stagewright.cluster.cluster import Cluster, DeviceGroup, Link, Links
from stagewright.errors import UsageError

_NAME = re.compile(r"(?:(\d+)x)?(\d+)x([a-z][a-z0-9 _-]*)", re.IGNORECASE)
# Latency of a step of a collective: NCCL's own estimates for NVLink and InfiniBand with its simple protocol
# (NCCL src/graph/tuning.cc, hwLat and baseLat).
INTRA_LATENCY_S = 2.5e-6
INTER_LATENCY_S = 8e-6


def is_cluster_name(text: str) -> bool:
    """Whether a text has the form of a cluster's name rather than that of a path."""
    return _NAME.fullmatch(text.strip()) is not None


def named_cluster(text: str) -> Cluster:
    """Return the cluster of a name such as `8xh100` or `32x8xa100`."""
    match = _NAME.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a cluster: write 8xh100 (one host) or 32x8xa100 (32 hosts)")
    hosts, count, name = int(match[1] or 1), int(match[2]), match[3]
    device = find_accelerator(name)
    if device is None:
        raise UsageError(f"{text!r}: the hardware {name!r} is unknown; known are {', '.join(accelerators())}")
    return Cluster(
        devices=(
            DeviceGroup(
                kind="cuda",
                count=count,
                hosts=hosts,
                memory_bytes=device.memory_bytes,
                hardware=device.name,
                host="host",
            ),
        ),
        links=Links(
            intra_host=Link(bandwidth_bytes_per_s=device.intra_link_bytes_per_s, latency_s=INTRA_LATENCY_S),
            inter_host=None
            if hosts == 1
            else Link(bandwidth_bytes_per_s=device.inter_link_bytes_per_s, latency_s=INTER_LATENCY_S),
        ),
    )


def network_of(cluster: Cluster) -> Network:
    """Return the links of a cluster, with the device's usual ones where the cluster states none."""
    group = cluster.devices[0]
    device = accelerator_of(group)
    intra, inter = cluster.links.intra_host, cluster.links.inter_host
    return Network(
        devices_per_host=group.count,
        intra_bytes_per_s=min(intra.bandwidth_bytes_per_s, _finite(intra, device.intra_link_bytes_per_s)),
        intra_latency_s=intra.latency_s,
        intra_share=device.intra_share,
        nvls_share=device.nvls_share,
        inter_bytes_per_s=device.inter_link_bytes_per_s if inter is None else inter.bandwidth_bytes_per_s,
        inter_latency_s=INTER_LATENCY_S if inter is None else inter.latency_s,
    )


def _finite(link: Link, usual: float) -> float:
    return usual if link.bandwidth_bytes_per_s == float("inf") else link.bandwidth_bytes_per_s


def rank_speeds(cluster: Cluster, layout: Layout) -> tuple[float, ...]:
    """Return the relative speed of each pipeline rank's slowest device; (): all devices are alike."""
    if len(cluster.devices) == 1:
        return ()
    first = _rate(cluster.devices[0])
    return tuple(min(map(_rate, groups)) / first for groups in _rank_groups(cluster, layout))


def rank_limits(cluster: Cluster, layout: Layout) -> tuple[int | None, ...]:
    """Return the memory of each pipeline rank's smallest device, None where it is unknown; (): all are alike."""
    if len({group.memory_bytes for group in cluster.devices}) == 1:
        return ()
    return tuple(
        min((group.memory_bytes for group in groups if group.memory_bytes is not None), default=None)
        for groups in _rank_groups(cluster, layout)
    )


def peak_flops(cluster: Cluster, num_devices: int, precision: str) -> float:
    """Return the peak rate of the first devices together."""
    total = 0.0
    for group in cluster.devices:
        used = min(num_devices, group.count * group.hosts)
        total += used * accelerator_of(group).flops(precision) if used else 0.0
        num_devices -= used
    return total


def _rank_groups(cluster: Cluster, layout: Layout) -> list[list[DeviceGroup]]:
    """Return the devices of each pipeline rank, each kind once."""
    stride = layout.stride("pipeline")
    groups: list[dict[int, DeviceGroup]] = [{} for _ in range(layout.pipeline)]
    for index, group in enumerate(cluster.members[: layout.num_devices]):
        groups[index // stride % layout.pipeline][id(group)] = group
    return [list(found.values()) for found in groups]


def _rate(group: DeviceGroup) -> float:
    device = accelerator_of(group)
    return device.flops_16 * device.matmul_share * group.speed
