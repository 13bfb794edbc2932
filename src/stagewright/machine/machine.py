"""This machine: cores, memory, GPUs, communication backends, versions.

Nothing is measured here (`probe_links` measures links). Torch is imported where GPUs and backends are queried, so pin
the process first where that matters.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from stagewright.cluster.device import Device, can_pin, has_gpu, usable_cores
from stagewright.errors import UsageError
from stagewright.machine.memory_cgroup import memory_limits

_PACKAGES = ("stagewright", "torch", "transformers", "numpy", "pyarrow", "safetensors")
_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    index: int
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware and software of this machine."""

    system: str
    """Operating system and release."""
    processor: str
    cores: tuple[int, ...]
    """Cores that this process may use."""
    separate_cores: tuple[int, ...]
    """Physical cores: the first hyper-thread of each."""
    core_quota: float | None
    """CPU quota of the container, in cores; None: unlimited."""
    can_pin: bool
    memory_bytes: int | None
    """Memory that this process may use; None where it is unknown."""
    gpus: tuple[Gpu, ...]
    """GPUs that torch can use."""
    backends: tuple[str, ...]
    """Communication backends: gloo, nccl, mpi."""
    versions: dict[str, str]
    """Versions of Python, installed packages and CUDA."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Warnings about measurements and runs on this machine, one sentence each."""
        warnings = []
        if not self.can_pin:
            warnings.append("This system can't pin processes to cores: times of CPU devices will vary.")
        if len(self.separate_cores) < 2 and not self.gpus:
            warnings.append("There is one core: two workers will share it, so no speed-up can be seen here.")
        if len(self.separate_cores) < len(self.cores):
            warnings.append(
                f"{len(self.cores)} hyper-threads are {len(self.separate_cores)} cores: "
                f"use one CPU device a core ({', '.join(f'cpu:{core}' for core in self.separate_cores[:3])} …)."
            )
        if self.core_quota is not None and self.core_quota < len(self.separate_cores):
            warnings.append(
                f"The container may use {self.core_quota:g} of {len(self.separate_cores)} cores' time: "
                f"use at most {max(1, int(self.core_quota))} CPU devices."
            )
        if "gloo" not in self.backends:
            warnings.append("This torch has no Gloo: CPU devices can't communicate.")
        if self.gpus and "nccl" not in self.backends:
            warnings.append("This torch has no NCCL: GPUs can't communicate.")
        if "pyarrow" not in self.versions:
            warnings.append(
                "pyarrow is not installed, so events are written as JSON lines; "
                "install it with: pip install 'stagewright[trace]'."
            )
        return tuple(warnings)


def probe_machine() -> Machine:
    """Read the hardware and software of this machine."""
    import torch
    from torch import distributed

    cores = tuple(sorted(usable_cores()))
    available = distributed.is_available()
    backends = {
        "gloo": available and distributed.is_gloo_available(),
        "nccl": available and distributed.is_nccl_available() and torch.cuda.device_count() > 0,
        "mpi": available and distributed.is_mpi_available(),
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
    """Return the first hyper-thread of each physical core; all cores where the topology is unknown."""
    first: dict[tuple[str, str] | int, int] = {}
    for core in sorted(usable_cores() if cores is None else cores):
        position: tuple[str, str] | int = core
        with contextlib.suppress(OSError):
            topology = _CPUS / f"cpu{core}" / "topology"
            position = (topology / "physical_package_id").read_text(), (topology / "core_id").read_text()
        first.setdefault(position, core)
    return tuple(first.values())


def spread_cores() -> tuple[int, ...]:
    """Return the usable cores in the order in which workers use them: physical cores first, then hyper-threads."""
    return tuple(dict.fromkeys((*separate_cores(), *sorted(usable_cores()))))


def num_gpus() -> int:
    """Return how many GPUs torch sees; torch is imported only if the machine has one."""
    if not has_gpu():
        return 0
    import torch

    return torch.cuda.device_count()  # is_available() would initialize CUDA, after which no share of a GPU can be had


def default_devices(num_workers: int, *, share: bool = False) -> tuple[str, ...]:
    """Return a device for each worker: GPUs, which workers share where there are too few, else one core each.

    With `share`, too few GPUs are left alone and cores are shared.
    """
    gpus = num_gpus()
    if gpus >= num_workers or (gpus and not share):
        return tuple(f"cuda:{worker % gpus}" for worker in range(num_workers))
    cores = spread_cores()
    if num_workers > len(cores) and not share:
        raise UsageError(
            f"{num_workers} devices were asked for, but this machine has {len(cores)} cores; use {len(cores)} or "
            "fewer, or name cores more than once to share them, which gains no time: --devices "
            f"{','.join(f'cpu:{cores[worker % len(cores)]}' for worker in range(min(num_workers, 2 * len(cores), 8)))}"
            + ("" if num_workers <= 8 else ",… (to forecast more devices: `stagewright plan --cluster`)")
        )
    return tuple(f"cpu:{cores[worker % len(cores)]}" for worker in range(num_workers))


def describe_choice(devices: Sequence[str]) -> str | None:
    """Say what `default_devices` did where it is not a GPU for each worker."""
    if devices[0].startswith("cpu"):
        return f"torch sees no GPU here: running on {_list(devices)}"
    distinct = list(dict.fromkeys(devices))
    if len(distinct) == len(devices):
        return None
    shares = ",".join([f"{distinct[0]}/{max(8, len(devices))}"] * len(devices))
    return (
        f"{len(devices)} devices were asked for and torch sees {len(distinct)} GPU{'s' if len(distinct) > 1 else ''}: "
        f"{len(devices)} workers share {_list(distinct)}, so results are verified, but no speed-up can be seen; "
        f"--devices {shares} gives each worker SMs of its own (CUDA MPS), and compares with one such share"
    )


def _list(devices: Sequence[str]) -> str:
    return ", ".join(devices) if len(devices) <= 4 else f"{devices[0]} to {devices[-1]}"


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    versions = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _versions(torch_version: str, cuda_version: str | None) -> dict[str, str]:
    versions = {"python": platform.python_version(), **installed_versions(_PACKAGES), "torch": torch_version}
    return versions | ({"cuda": cuda_version} if cuda_version else {})


def _gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.device_count():
        return ()
    properties: Mapping[int, Any] = {
        index: torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
    }
    return tuple(Gpu(index=index, name=gpu.name, memory_bytes=gpu.total_memory) for index, gpu in properties.items())


def _memory_bytes() -> int | None:
    """Return the machine's memory, or the container's limit where it is smaller."""
    limits = []
    with contextlib.suppress(OSError, ValueError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limits += [group.limit_bytes for group in memory_limits()]
    return min(limits, default=None)


def _core_quota() -> float | None:
    """Return the container's CPU quota in cores."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((_CGROUP / "cpu/cpu.cfs_quota_us").read_text())
        return quota_us / int((_CGROUP / "cpu/cpu.cfs_period_us").read_text()) if quota_us > 0 else None
    return None
