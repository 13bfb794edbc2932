"""This machine: cores, memory, GPUs, what processes talk through, versions.

Reads what the system tells; measures nothing (links are measured by `probe`). Torch is imported when GPUs and backends
are asked for, so pin first where that matters.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from stagewright.cluster.device import Device, can_pin, usable_cores
from stagewright.errors import UsageError

__all__ = ["Gpu", "Machine", "default_devices", "probe_machine", "separate_cores", "spread_cores"]

_PACKAGES = ("stagewright", "torch", "transformers", "numpy", "pyarrow", "safetensors")
_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    index: int
    """Its number for torch."""
    name: str
    """As its vendor writes it."""
    memory_bytes: int
    """All of its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this machine has."""

    system: str
    """The system and its release."""
    processor: str
    """The processor, as its vendor writes it."""
    cores: tuple[int, ...]
    """The cores that this process may use, by the system's numbers."""
    separate_cores: tuple[int, ...]
    """Those of them that share no core with an earlier one: hyper-threads are counted once."""
    core_quota: float | None
    """Cores' worth of time that a container may use; None: all."""
    can_pin: bool
    """Whether processes can be pinned to cores."""
    memory_bytes: int | None
    """Memory that this process may use; None where the system does not tell."""
    gpus: tuple[Gpu, ...]
    """GPUs that torch can use."""
    backends: tuple[str, ...]
    """What workers can talk through: gloo, nccl, mpi."""
    versions: dict[str, str]
    """Versions of Python, the packages and CUDA; a package that is not installed is left out."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What will disturb measurements or runs, a sentence each."""
        found = []
        if not self.can_pin:
            found.append("This system can't pin processes to cores: times of CPU devices will wander.")
        if len(self.separate_cores) < 2 and not self.gpus:
            found.append("There is one core: two workers will share it, so no speed-up can be seen here.")
        if len(self.separate_cores) < len(self.cores):
            found.append(
                f"{len(self.cores)} hyper-threads are {len(self.separate_cores)} cores: "
                f"use one CPU device a core ({', '.join(f'cpu:{core}' for core in self.separate_cores[:3])} …)."
            )
        if self.core_quota is not None and self.core_quota < len(self.separate_cores):
            found.append(
                f"The container may use {self.core_quota:g} of {len(self.separate_cores)} cores' time: "
                f"use at most {max(1, int(self.core_quota))} CPU devices."
            )
        if "gloo" not in self.backends:
            found.append("This torch has no Gloo: CPU devices can't talk to each other.")
        if self.gpus and "nccl" not in self.backends:
            found.append("This torch has no NCCL: GPUs can't talk to each other.")
        if "pyarrow" not in self.versions:
            found.append("pyarrow is not installed: events are written as JSON lines; try pip install pyarrow.")
        return tuple(found)


def probe_machine() -> Machine:
    """Looks at this machine."""
    import torch
    from torch import distributed

    cores = tuple(sorted(usable_cores()))
    there = distributed.is_available()
    backends = {
        "gloo": there and distributed.is_gloo_available(),
        "nccl": there and distributed.is_nccl_available() and torch.cuda.is_available(),
        "mpi": there and distributed.is_mpi_available(),
    }
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=Device(text="cpu", kind="cpu", cores=cores).hardware_name(),
        cores=cores,
        separate_cores=separate_cores(cores),
        core_quota=_core_quota(),
        can_pin=can_pin(),
        memory_bytes=_memory_bytes(),
        gpus=_gpus(),
        backends=tuple(name for name, present in backends.items() if present),
        versions=_versions(torch.__version__, torch.version.cuda),
    )


def separate_cores(cores: Iterable[int] | None = None) -> tuple[int, ...]:
    """Of these cores (all usable ones), the first hyper-thread of each; all of them where the system does not tell."""
    first: dict[tuple[str, str] | int, int] = {}
    for core in sorted(usable_cores() if cores is None else cores):
        place: tuple[str, str] | int = core
        with contextlib.suppress(OSError):
            topology = _CPUS / f"cpu{core}" / "topology"
            place = (topology / "physical_package_id").read_text(), (topology / "core_id").read_text()
        first.setdefault(place, core)
    return tuple(first.values())


def spread_cores() -> tuple[int, ...]:
    """The usable cores in the order in which workers take them: one of each core first, then their hyper-threads."""
    return tuple(dict.fromkeys((*separate_cores(), *sorted(usable_cores()))))


def default_devices(num_workers: int, *, share: bool = False) -> tuple[str, ...]:
    """One device a worker: GPUs where there are enough, else a core each; `share` lets workers share cores."""
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() >= num_workers:
        return tuple(f"cuda:{index}" for index in range(num_workers))
    cores = spread_cores()
    if num_workers > len(cores) and not share:
        raise UsageError(
            f"{num_workers} devices were asked for, but this machine has {len(cores)} cores; use {len(cores)} or "
            "fewer, or name cores more than once to share them, which gains no time: --devices "
            f"{','.join(f'cpu:{cores[at % len(cores)]}' for at in range(min(num_workers, 2 * len(cores), 8)))}"
            + (
                ""
                if num_workers <= 8
                else ",… (what more devices would give is forecast: `stagewright plan --cluster`)"
            )
        )
    return tuple(f"cpu:{cores[worker % len(cores)]}" for worker in range(num_workers))


def _versions(torch_version: str, cuda_version: str | None) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    versions["torch"] = torch_version  # tells builds apart: 2.13.0+cpu
    return versions | ({"cuda": cuda_version} if cuda_version else {})


def _gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    properties: Mapping[int, Any] = {
        index: torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
    }
    return tuple(Gpu(index=index, name=one.name, memory_bytes=one.total_memory) for index, one in properties.items())


def _memory_bytes() -> int | None:
    """The machine's memory, or the container's limit where that is less."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int((_CGROUP / name).read_text()))
    return min(found, default=None)


def _core_quota() -> float | None:
    """The container's share of time, in cores."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((_CGROUP / "cpu/cpu.cfs_quota_us").read_text())
        return quota_us / int((_CGROUP / "cpu/cpu.cfs_period_us").read_text()) if quota_us > 0 else None
    return None
