"""Accelerators by name: data-sheet rates and the share of them that kernels sustain (devices.toml).

A name matches by whole words, so "RTX A1000" is not an A100. A device that is not in the table states its own figures
in the cluster file: `peak_flops` and `memory_bandwidth`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from stagewright.cluster.cluster import Cluster, DeviceGroup
from stagewright.errors import UsageError
from stagewright.quantity import parse_bytes

# Shares for a device that states only its peak: the mean of those in devices.toml.
_DEFAULT_SHARES = {"matmul_share": 0.7, "attention_share": [0.45, 0.38]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """Rates of a device."""

    name: str
    flops_16: float
    """Dense 16-bit operations per second."""
    flops_tf32: float
    flops_32: float
    num_sms: int
    """Streaming multiprocessors, or compute units."""
    bandwidth_bytes_per_s: float
    memory_bytes: int
    intra_link_bytes_per_s: float
    """Per direction, between two devices of a host."""
    inter_link_bytes_per_s: float
    """Network bandwidth per device."""
    matmul_share: float
    """Share of the peak that large matrix products sustain."""
    attention_share: tuple[float, float]
    """Share of the peak that the vendor's fused attention sustains on long sequences: forward, backward."""
    flash_share: tuple[float, float]
    """The same for FlashAttention-2."""
    intra_share: float = 0.8
    """Share of the link inside a host that large collectives reach."""
    nvls_share: float = 0.0
    """Bytes per second of an all-reduce inside the switches of a host, over the link's; 0: they can't add."""
    wave_rounding: float = 0.0
    """How much of the last, partly filled wave of tiles counts: 1 all of it, 0 only the tiles in it."""
    source: str = "formulas"
    """Where the shares come from: measured kernels, measured kernels scaled, or formulas."""

    def flops(self, precision: str) -> float:
        """Return the peak rate of matrix products."""
        return self.flops_32 if precision == "float32" else self.flops_16


@cache
def accelerators() -> Mapping[str, Accelerator]:
    """Return the known accelerators by name."""
    table = _table()
    return {name: _accelerator(name, table) for name in table}


@cache
def find_accelerator(hardware: str) -> Accelerator | None:
    """Return the accelerator that a hardware name means; None if it is unknown.

    >>> find_accelerator("NVIDIA A100-SXM4-40GB").name
    'A100 40GB'
    >>> find_accelerator("NVIDIA RTX A1000") is None
    True
    """
    words = set(re.findall(r"[a-z0-9]+", hardware.lower()))
    matches = [(len(alias), name) for name, row in _table().items() for alias in row["words"] if set(alias) <= words]
    return accelerators()[max(matches)[1]] if matches else None


def accelerator_of(group: DeviceGroup) -> Accelerator:
    """Return the rates of a cluster's devices; what the cluster file states wins over the table."""
    found = find_accelerator(group.hardware or "")
    if found is None:
        if group.peak_flops is None or group.memory_bandwidth is None:
            raise UsageError(
                f"the rates of the hardware {group.hardware or ''!r} are unknown: state peak_flops = 300e12 and "
                'memory_bandwidth = "2TB/s" under [[devices]] in the cluster file, or set hardware to one of '
                f"{', '.join(accelerators())}"
            )
        found = Accelerator(
            name=group.hardware or "own device",
            flops_16=group.peak_flops,
            flops_tf32=group.peak_flops / 2,
            flops_32=group.peak_flops_32 or group.peak_flops / 16,
            num_sms=group.num_sms or 108,
            bandwidth_bytes_per_s=group.memory_bandwidth,
            memory_bytes=group.memory_bytes or 80 << 30,
            intra_link_bytes_per_s=32e9,
            inter_link_bytes_per_s=12.5e9,
            matmul_share=float(_DEFAULT_SHARES["matmul_share"]),  # type: ignore[arg-type]
            attention_share=tuple(_DEFAULT_SHARES["attention_share"]),  # type: ignore[arg-type]
            flash_share=tuple(_DEFAULT_SHARES["attention_share"]),  # type: ignore[arg-type]
        )
    return replace(
        found,
        flops_16=group.peak_flops or found.flops_16,
        flops_32=group.peak_flops_32 or found.flops_32,
        bandwidth_bytes_per_s=group.memory_bandwidth or found.bandwidth_bytes_per_s,
        num_sms=group.num_sms or found.num_sms,
        memory_bytes=group.memory_bytes or found.memory_bytes,
    )


def efficient_device(cluster: Cluster, efficiency: float | None) -> Accelerator:
    """Return the rates of a cluster's first devices, with a stated share of the peak for matrix products."""
    device = accelerator_of(cluster.devices[0])
    if efficiency is None:
        return device
    if not 0 < efficiency <= 1:
        raise UsageError(f"an efficiency of {efficiency} is not possible: use a number above 0 and up to 1")
    return replace(device, matmul_share=efficiency)


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("devices.toml").read_text(encoding="utf-8"))


def _accelerator(name: str, table: Mapping[str, Any]) -> Accelerator:
    row = {**(table[table[name]["like"]] if "like" in table[name] else {}), **table[name]}
    return Accelerator(
        name=name,
        flops_16=row["flops_16"],
        flops_tf32=row["flops_tf32"],
        flops_32=row["flops_32"],
        num_sms=row["num_sms"],
        bandwidth_bytes_per_s=row["bandwidth"],
        memory_bytes=parse_bytes(row["memory"]),
        intra_link_bytes_per_s=row["intra_link"],
        inter_link_bytes_per_s=row["inter_link"],
        matmul_share=row["matmul_share"],
        attention_share=(row["attention_share"][0], row["attention_share"][1]),
        intra_share=row.get("intra_share", 0.8),
        nvls_share=row.get("nvls_share", 0.0),
        wave_rounding=row.get("wave_rounding", 0.0),
        flash_share=tuple(row.get("flash_share", row["attention_share"])),
        source="measured kernels scaled"
        if "like" in table[name] and row.get("source")
        else row.get("source", "formulas"),
    )
