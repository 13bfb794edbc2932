"""The cluster's file.

    [[devices]]                      [links.intra_host]
    kind = "cuda"                    bandwidth = "50GB/s"
    count = 8                        latency = "10us"
    memory = "80GiB"
    speed = 1.0                      [links.inter_host]
    host = "a"                       bandwidth = "100Gbit/s"
                                     latency = "50us"

A bare number is bytes, bytes per second or seconds. Without links, communication is free.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from stagewright.cluster.cluster import FREE, Cluster, DeviceGroup, Link, Links
from stagewright.errors import UsageError
from stagewright.files import toml_table as toml
from stagewright.files.atomic import save_text

Value = TypeVar("Value")

_DEVICES: dict[str, toml.Reader] = {
    "kind": toml.choice("cpu", "cuda"),
    "count": toml.integer,
    "memory": toml.size,
    "speed": toml.number,
    "cores": toml.integer,
    "host": toml.text,
    "hosts": toml.integer,
    "hardware": toml.text,
    "peak_flops": toml.number,
    "peak_flops_32": toml.number,
    "memory_bandwidth": toml.rate,
    "num_sms": toml.integer,
    "price": toml.number,
}
_LINK: dict[str, toml.Reader] = {"bandwidth": toml.rate, "latency": toml.seconds}
_LINKS: dict[str, toml.Reader] = dict.fromkeys(
    ("intra_host", "inter_host", "collective", "host"), lambda value, where: _link(value, where)
)
_CLUSTER: dict[str, toml.Reader] = {
    "devices": toml.list_of(lambda value, where: _group(value, where)),
    "links": lambda value, where: Links(**toml.read_table(value, _LINKS, where)),
}


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster file."""
    if not Path(path).exists():
        raise UsageError(f"there is no cluster file {path}; `stagewright doctor -o {path}` writes this machine's")
    values = toml.read_table(toml.load_toml(path), _CLUSTER, str(path), required=["[[devices]]"])
    return _build(Cluster, values, str(path))


def write_cluster(cluster: Cluster, path: str | Path, comment: str = "") -> None:
    """Write a cluster file atomically, with a comment at its top."""
    save_text(cluster_to_toml(cluster, comment), path)


def cluster_to_toml(cluster: Cluster, comment: str = "") -> str:
    """Format a cluster as TOML."""
    links = {
        name: {"bandwidth": toml.write_rate(link.bandwidth_bytes_per_s), "latency": toml.write_seconds(link.latency_s)}
        for name in _LINKS
        if (link := getattr(cluster.links, name)) not in (None, FREE)
    }
    content = {"devices": [_group_table(group) for group in cluster.devices], **({"links": links} if links else {})}
    return "".join(f"# {line}\n" for line in comment.splitlines()) + toml.to_toml(content)


def _group_table(group: DeviceGroup) -> dict[str, Any]:
    return {
        "kind": group.kind,
        "count": group.count,
        "cores": group.cores if group.kind == "cpu" or group.cores != 1 else None,
        "memory": None if group.memory_bytes is None else toml.write_size(group.memory_bytes),
        "speed": group.speed,
        "host": group.host,
        "hosts": group.hosts if group.hosts != 1 else None,
        "hardware": group.hardware,
        "peak_flops": group.peak_flops,
        "peak_flops_32": group.peak_flops_32,
        "memory_bandwidth": None if group.memory_bandwidth is None else toml.write_rate(group.memory_bandwidth),
        "num_sms": group.num_sms,
        "price": group.price,
    }


def _group(value: object, where: str) -> DeviceGroup:
    values = toml.read_table(value, _DEVICES, where, required=['kind = "cuda"', "count = 8"])
    if "memory" in values:
        values["memory_bytes"] = values.pop("memory")
    return _build(DeviceGroup, values, where)


def _link(value: object, where: str) -> Link:
    values = toml.read_table(value, _LINK, where, required=['bandwidth = "25GB/s"'])
    return _build(Link, {"bandwidth_bytes_per_s": values["bandwidth"], "latency_s": values.get("latency", 0.0)}, where)


def _build(kind: Callable[..., Value], values: dict[str, Any], where: str) -> Value:
    """Build a value; its errors name the position in the file."""
    try:
        return kind(**values)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
